"""Rules for spec fields that also apply at run time."""
