"""From vLLM's outputs to deltas: streams, parsers, structured outputs, continuation."""
