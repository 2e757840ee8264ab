"""Signatures of the TCP connections between the ranks of one engine over several nodes."""
