"""Images in prompts: their place in the tokens, what identifies them, and what their headers say."""
