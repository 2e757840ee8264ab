"""Which client frameworks work unmodified: their suites against a gateway, in an environment of their own."""
