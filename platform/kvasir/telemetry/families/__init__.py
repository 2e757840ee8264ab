"""Metric families: those that are updated as requests run, and those that are read at scrape time."""
