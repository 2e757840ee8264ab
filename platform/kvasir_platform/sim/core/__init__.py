"""kvasir_platform.sim.core."""
