"""What several composition roots share."""
