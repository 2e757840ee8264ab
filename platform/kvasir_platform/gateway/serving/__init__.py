"""kvasir_platform.gateway.serving."""
