"""Commands that show what happens now."""
