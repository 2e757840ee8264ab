"""kvasir_platform.cluster.kubernetes."""
