"""The platform around router and workers: gateway, control, simulation, command line."""
