"""Media in prompts (images, videos, audio): their place in the tokens, what identifies them, and what their
headers say."""
