"""Which worker holds which prefix: the router's picture of every KV cache in the fleet."""

from kvasir_router.index.radix import IndexStats, Owner, PrefixIndex

__all__ = ["IndexStats", "Owner", "PrefixIndex"]
