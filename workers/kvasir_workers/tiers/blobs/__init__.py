"""Durable tiers that hold blocks as blobs: disk and Redis."""
