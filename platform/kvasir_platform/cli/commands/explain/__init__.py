"""`kvasir explain`: why a request ran where it ran, the regret of decisions, and the sizes of pools."""
