"""The encoding of session messages, and the pump that carries a session over its connections."""
