"""The OpenAPI document of all endpoints."""
