"""The seams between decisions and the world: each foreign library stands behind one of these."""
