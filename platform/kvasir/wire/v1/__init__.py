"""Generated from proto/kvasir/wire/v1 by proto/generate.py."""
