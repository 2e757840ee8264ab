"""What a benchmark leaves: a file, a page, tables, and comparisons."""
