"""Routes while they serve: which model answers, how a canary is judged, and copies to a shadow."""
