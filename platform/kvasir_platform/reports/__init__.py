"""What reports are made of, for every command: pages that load nothing else, charts, and files."""
