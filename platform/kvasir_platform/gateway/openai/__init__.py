"""OpenAI's API: schemas, validation, sampling, streamed and whole answers."""
