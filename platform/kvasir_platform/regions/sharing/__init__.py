"""What tenants may use in all cells together."""
