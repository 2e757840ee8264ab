"""Programs that run in pods of the release, sent to `python -c`: they need the standard library alone."""
