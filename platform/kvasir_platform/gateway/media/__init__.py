"""Images, videos and audio that clients name by URL."""
