"""kvasir_platform.gateway.operator."""
