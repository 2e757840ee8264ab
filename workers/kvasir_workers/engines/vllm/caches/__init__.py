"""Folders that engines share and keep between starts: copies of models, and compiled code."""
