"""What workers report of the model that they serve."""
