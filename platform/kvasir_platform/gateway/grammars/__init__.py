"""What a client's patterns, schemas and grammars cost to match, judged before a worker compiles them."""
