"""What touches vLLM's own classes. Imported only after vLLM's environment is set."""
