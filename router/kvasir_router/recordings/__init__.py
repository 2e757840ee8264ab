"""Recordings: what arrived, how it ended and why it ran where it ran, for readers outside of the router."""
