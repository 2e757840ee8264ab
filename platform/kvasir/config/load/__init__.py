"""Loads kvasir.yaml into a validated deployment spec, with errors that name file, line and field."""
