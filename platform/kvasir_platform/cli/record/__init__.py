"""`kvasir record`: reads what the routers of a deployment record, and writes it to files."""
