"""Measurements of the product as `make up` starts it; each scenario writes one report."""
