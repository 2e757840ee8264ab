"""kvasir_platform.cluster.ray."""
