"""The bench of `kvasir sim`."""
