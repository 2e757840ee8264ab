"""`kvasir sim`: options, settings, tables and pages."""
