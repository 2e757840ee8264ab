"""kvasir_platform.gateway.prompt."""
