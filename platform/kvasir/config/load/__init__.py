"""kvasir.config.load."""
