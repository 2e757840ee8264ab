"""Commands that show what happens now: `kvasir trace`, `kvasir logs`, `kvasir tail`."""
