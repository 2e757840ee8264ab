"""The machine and the fleet for requests for embeddings, which hold no KV."""
