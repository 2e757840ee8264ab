"""`kvasir cost`: what tenants, keys and models have cost."""
