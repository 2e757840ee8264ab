"""Code that several composition roots share."""
