"""Anthropic's Messages API: schema, translation to a chat, and its forms of answers and errors."""
