"""The encoding of a session and the pump that carries it over one connection after another."""
