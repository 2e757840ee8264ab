"""What routers say of themselves, as values."""
