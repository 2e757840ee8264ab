"""The scorecard: for each fault, a proof that it happened, and measurements of what the platform did."""
