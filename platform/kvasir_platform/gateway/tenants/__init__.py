"""Authentication and authorization of callers: API keys, tenants, limits and cache salts."""
