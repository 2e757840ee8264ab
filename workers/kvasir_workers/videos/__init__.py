"""Decoding of videos, each in a process of its own with bounded memory."""
