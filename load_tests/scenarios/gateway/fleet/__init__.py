"""What a fleet costs a router besides its requests."""
