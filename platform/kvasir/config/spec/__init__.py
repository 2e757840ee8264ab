"""The deployment spec: one frozen, validated tree of models."""
