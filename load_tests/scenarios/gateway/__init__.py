"""Cost of the whole gateway path, compared with proxies and peers in one run."""
