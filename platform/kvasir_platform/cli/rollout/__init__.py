"""The command that takes a canary from cell to cell."""
