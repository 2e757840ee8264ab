"""What tests use to open pages."""
