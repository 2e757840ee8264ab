"""OpenAI's API: schemas, validation, sampling, streamed and whole answers, and the OpenAPI document."""
