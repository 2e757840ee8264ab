"""What clients notice of the losses that a cluster brings: of nodes, of upgrades, of certificates."""
