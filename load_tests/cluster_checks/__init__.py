"""Checks of a release on a live Kubernetes cluster, through kubectl and helm: docs/CLUSTER_CHECKS.md."""
