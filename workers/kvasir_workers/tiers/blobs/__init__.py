"""kvasir_workers.tiers.blobs."""
