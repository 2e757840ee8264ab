"""Routing: the prefix index, the decision, the request machine and the shell around them."""
