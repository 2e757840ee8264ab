"""What tests of alerts and dashboards need: checks of expressions, Prometheus, and fleets with faults."""
