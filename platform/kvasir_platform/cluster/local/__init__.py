"""kvasir_platform.cluster.local."""
