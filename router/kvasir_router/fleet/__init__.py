"""What the router knows of workers: load, health, roles, and the record of each decision."""
