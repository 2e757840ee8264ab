"""What requests need of a cell beside their model, and how media get there."""
