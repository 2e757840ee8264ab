"""What requests cost: claims on the time of workers, where they are kept, statements, and budgets."""
