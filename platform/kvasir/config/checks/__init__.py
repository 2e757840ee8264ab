"""kvasir.config.checks."""
