"""OpenAI's Batch API: files of requests, run in capacity that other requests leave."""
