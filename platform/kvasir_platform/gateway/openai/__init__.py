"""kvasir_platform.gateway.openai."""
