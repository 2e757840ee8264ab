"""The HTTP edge: OpenAI's API over plain HTTP/1.1 and server-sent events, on top of the router's port."""
