"""Images that clients name by URL."""
