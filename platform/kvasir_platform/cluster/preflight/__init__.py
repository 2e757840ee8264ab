"""kvasir_platform.cluster.preflight."""
