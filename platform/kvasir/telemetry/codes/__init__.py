"""The codes of outcomes by area, in the order of docs/errors.md."""
