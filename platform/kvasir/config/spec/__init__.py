"""kvasir.config.spec.deployment."""
