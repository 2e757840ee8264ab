"""Measures a running deployment for `kvasir calibrate`."""
