"""Which models are served how: tiny models of each architecture on real engines, compared with vLLM alone."""
