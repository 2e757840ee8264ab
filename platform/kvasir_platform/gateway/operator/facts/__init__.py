"""What the status page shows beside the views of the router."""
