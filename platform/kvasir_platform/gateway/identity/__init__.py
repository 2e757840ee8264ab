"""Who calls: what an API key or a token says of its holder, and how tokens of a provider are verified."""
