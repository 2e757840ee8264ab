"""What a gateway serves: models with their capabilities, and SLO classes."""
