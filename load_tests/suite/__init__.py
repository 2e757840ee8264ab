"""Every report, what it must contain and what it depends on, and the command that makes all of them."""
