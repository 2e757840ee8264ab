"""Grafana dashboards of a deployment, as code."""
