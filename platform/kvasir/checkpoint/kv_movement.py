"""Whether the KV of a model can be moved: handed from prefill to decode workers, and kept in tiers.

vLLM keeps KV in groups of layers with their own block tables. Kvasir moves blocks of one group. A model whose
layers differ only in how many tokens they keep becomes one group when each keeps all of them, at the cost of
their memory. A recurrent state is no block of tokens, and is not moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvasir.checkpoint.attention import LayerCache, LayerKind, layer_caches
from kvasir.checkpoint.model_config import ModelConfig

_WINDOWED = (LayerKind.SLIDING, LayerKind.CHUNKED)


@dataclass(frozen=True, slots=True)
class KvMovement:
    """Whether and how KV is moved. `obstacle` says why it cannot be, "" if it can. `widened` is the number of
    layers, of `layers`, that keep KV of every token while KV is moved, and of the last `window` tokens
    otherwise."""

    obstacle: str = ""
    layers: int = 0
    widened: int = 0
    window: int = 0

    @property
    def cost(self) -> str:
        """What moving costs in memory, in words, "" for nothing."""
        if not self.widened:
            return ""
        return (
            f"{self.widened} of {self.layers} layers attend to the last {self.window} tokens only, and keep "
            "KV of every token while KV is moved; with disaggregation: never and without tiers they keep "
            "KV of their window"
        )


def kv_movement(config: ModelConfig) -> KvMovement:
    """Return whether and how vLLM 0.32 and the connector move the model's KV."""
    caches = layer_caches(config)
    windowed = [each for each in caches if each.kind in _WINDOWED]
    if obstacle := _obstacle(config, caches, windowed):
        return KvMovement(obstacle, len(caches))
    kinds = {each.kind for each in caches}
    if not windowed or kinds == {LayerKind.SLIDING}:
        return KvMovement(layers=len(caches))
    return KvMovement(layers=len(caches), widened=len(windowed), window=windowed[0].window)


def _obstacle(config: ModelConfig, caches: Sequence[LayerCache], windowed: Sequence[LayerCache]) -> str:
    if config.raw.get("is_encoder_decoder"):
        return "an encoder-decoder keeps KV of its encoder beside that of its decoder"
    if "compress_ratios" in config.text:
        return "its layers compress KV at different ratios, in several block tables"
    if recurrent := sum(each.kind is LayerKind.RECURRENT for each in caches):
        return (
            f"{recurrent} of its {len(caches)} layers keep a recurrent state (state-space or linear "
            "attention), which is no block of tokens"
        )
    if len(windows := sorted({(each.kind.value, each.window) for each in windowed})) > 1:
        listed = ", ".join(f"{kind} {window}" for kind, window in windows)
        return f"its layers have windows of several sizes: {listed}"
    kinds = {each.kind for each in caches}
    if (windowed and LayerKind.MLA in kinds) or kinds == {LayerKind.CHUNKED}:
        listed = ", ".join(sorted(kind.value for kind in kinds))
        return f"its layers are of kinds that vLLM does not keep in one block table: {listed}"
    return ""
