"""`kvasir bench`: load on an OpenAI-compatible endpoint, and what came of it."""
