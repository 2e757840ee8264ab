"""From messages to token ids: chat templates, tokenizers, and tokens of prefixes seen before."""
