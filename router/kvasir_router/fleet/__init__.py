"""The router's view of its workers: load, health, roles, and the record of each decision."""
