"""Scorecard rows about isolation of tenants, certificates, SSRF and secrets."""
