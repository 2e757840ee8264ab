"""Rules that spec fields are checked against, and that are applied again at run time."""
