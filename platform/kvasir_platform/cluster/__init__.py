"""kvasir_platform.cluster."""
