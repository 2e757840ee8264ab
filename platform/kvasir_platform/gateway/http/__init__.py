"""HTTP/1.1 to clients: connections, limits, TLS, CORS, and vetted outbound connections."""
