"""kvasir_platform.gateway.http.exchange."""
