"""Converts messages to token ids: chat templates, tokenizers, and a cache of the tokens of prefixes."""
