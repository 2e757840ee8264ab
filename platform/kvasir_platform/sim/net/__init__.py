"""kvasir_platform.sim.net."""
