"""The modules that use vLLM's own classes. Imported only after vLLM's environment is set."""
