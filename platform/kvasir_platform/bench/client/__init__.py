"""The server that is loaded: what it accepts, prompts for it, and its answers."""
