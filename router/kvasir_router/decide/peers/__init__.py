"""Policies of other systems, each from its published formula, for comparison and for use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from kvasir.ports.clock import Rng
from kvasir.ports.routing import RoutingPolicy
from kvasir_router.decide.eligible import Disaggregation
from kvasir_router.decide.peers.consistent_hash import ConsistentHash
from kvasir_router.decide.peers.dynamo import Dynamo
from kvasir_router.decide.peers.llm_d import LlmD
from kvasir_router.decide.peers.mooncake import Mooncake
from kvasir_router.decide.peers.power_of_two import PowerOfTwo
from kvasir_router.decide.peers.prefix import LongestPrefix
from kvasir_router.decide.peers.production_stack import ProductionStack
from kvasir_router.decide.peers.session import StickySession
from kvasir_router.decide.peers.sglang import SglangCacheAware

__all__ = ["PEERS"]

PEERS: Mapping[str, Callable[[Disaggregation, Rng], RoutingPolicy]] = MappingProxyType(
    {
        policy.name: policy
        for policy in (
            PowerOfTwo,
            StickySession,
            ConsistentHash,
            LongestPrefix,
            Dynamo,
            LlmD,
            SglangCacheAware,
            Mooncake,
            ProductionStack,
        )
    }
)
