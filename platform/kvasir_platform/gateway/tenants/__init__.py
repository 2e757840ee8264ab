"""Who calls, and what they may: keys, tenants, limits and the salts that keep their caches apart."""
