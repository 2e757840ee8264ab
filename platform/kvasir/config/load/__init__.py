"""From kvasir.yaml to a validated deployment spec, with errors that name file, line and field."""
