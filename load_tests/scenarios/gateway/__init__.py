"""What the whole gateway path costs, beside proxies and peers, in one run."""
