"""How soon faults are named, by a real Prometheus and by the operator's page."""
