"""OpenAI's Responses API: its bodies, its output as items and events, and what is stored of it."""
