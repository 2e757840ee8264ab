"""kvasir_platform.gateway.catalog."""
