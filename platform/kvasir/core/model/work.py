"""The sizes of a transformer on which the time of its steps depends; counted by kvasir.performance.work.

Workers report them to routers, which know a worker's model from them alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """`layers` layers of one kind. For each query token and each token attended to, a layer takes `flops`
    operations, or `prompt_flops` in prompts if that is not 0; of each token attended to it reads `elements`
    numbers of KV. A chunk of a prompt takes `expanded_flops` for each token before it, whose keys and values
    it projects from latents. `window` is the most tokens that are attended to, 0 without a limit; `kv_heads`
    is among how many tensor-parallel ranks KV can be divided, 0 for any number."""

    layers: int
    flops: float
    elements: float
    window: int = 0
    prompt_flops: float = 0.0
    expanded_flops: float = 0.0
    kv_heads: int = 0

    def attended(self, context: float) -> float:
        """Return the tokens that a query behind `context` tokens attends to."""
        return min(context, self.window) if self.window else context

    def pairs(self, tokens: float, context: float) -> float:
        """Return the pairs of query and attended token of `tokens` successive tokens behind `context`, each
        of which attends to itself as well."""
        growing = min(tokens, max(0.0, self.window - context)) if self.window else tokens
        return growing * (context + (growing + 1.0) / 2.0) + (tokens - growing) * self.window


@dataclass(frozen=True, slots=True)
class ModelWork:
    """One model. Parameters: `dense` are used by every token, without embedding and head; `expert` are those
    of one expert in one layer, of which there are `experts` in each of `expert_layers`, and each token uses
    `experts_per_token`; `head` produces logits for sampled tokens. `hidden` and `layers` give the size of
    exchanges between devices. `state_bytes` are read and written for each sequence and step, which takes
    `state_flops` for each token."""

    layers: int
    hidden: int
    dense: float
    head: float
    embedding: float
    attention: tuple[AttentionWork, ...]
    expert: float = 0.0
    experts: int = 0
    experts_per_token: int = 0
    expert_layers: int = 0
    state_bytes: float = 0.0
    state_flops: float = 0.0

    @property
    def parameters(self) -> float:
        """All parameters."""
        return self.dense + self.head + self.embedding + self.expert * self.experts * self.expert_layers

    @property
    def active(self) -> float:
        """The parameters that one token uses in linear layers, without embedding and head."""
        return self.dense + self.expert * self.experts_per_token * self.expert_layers

    def experts_read(self, tokens: float) -> float:
        """Return the expected number of experts of a layer that are read in a step of `tokens` tokens, each
        choosing `experts_per_token` at random."""
        if not self.experts:
            return 0.0
        unused = 1.0 - self.experts_per_token / self.experts
        return self.experts * (1.0 - math.pow(unused, tokens))

    def linear_flops(self, tokens: float, sampled: float) -> float:
        """Return the operations in linear and recurrent layers of a step."""
        return 2.0 * (self.active * tokens + self.head * sampled) + self.state_flops * tokens

    def weights_read(self, tokens: float) -> float:
        """Return the parameters that a step of `tokens` tokens reads."""
        return self.dense + self.head + self.expert * self.experts_read(tokens) * self.expert_layers

    def attention_flops(self, tokens: float, context: float) -> float:
        """Return the operations of attention for `tokens` streams of `context` tokens, one token each."""
        return sum(each.layers * each.flops * tokens * each.attended(context) for each in self.attention)

    def prompt_flops(self, tokens: float, context: float) -> float:
        """Return the operations of attention for a chunk of `tokens` tokens of a prompt behind `context`."""
        return sum(
            each.layers
            * (
                (each.prompt_flops or each.flops) * each.pairs(tokens, context)
                + each.expanded_flops * each.attended(context)
            )
            for each in self.attention
        )

    def kv_elements(self, context: float) -> float:
        """Return the numbers of KV that a query behind `context` tokens reads."""
        return sum(each.layers * each.elements * each.attended(context) for each in self.attention)
