"""A day over five regions: what the choice of a cell costs, and how long the first token takes."""
