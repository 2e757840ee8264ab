"""The deployment spec: a frozen, validated tree of models."""
