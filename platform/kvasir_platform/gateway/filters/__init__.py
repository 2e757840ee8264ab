"""Output filters: what of a model's output clients may see, judged while it streams."""
