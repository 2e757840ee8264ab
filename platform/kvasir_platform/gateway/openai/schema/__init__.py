"""The request and response bodies of the API, and their decoding."""
