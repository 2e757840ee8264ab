"""The router: prefix index, routing decisions, request machines, sessions and the asyncio shell around
them."""
