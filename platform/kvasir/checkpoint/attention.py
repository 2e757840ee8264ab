"""What each layer of a model keeps of a request's tokens, from config.json.

Follows the defaults of transformers' configuration classes and the layers that vLLM 0.32 builds from them, so
that the size of a model's KV and whether it can be moved are known before an engine starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from kvasir.checkpoint.model_config import ModelConfig
from kvasir.checkpoint.numbers import LAYERS, count, positive


class LayerKind(Enum):
    """What a layer keeps: KV of every token (`full`), of the last tokens (`sliding`), of the tokens since the
    last multiple of a chunk (`chunked`), one compressed latent for each token (`mla`), or a state of fixed
    size (`recurrent`: state-space models, linear attention, short convolutions)."""

    FULL = "full"
    SLIDING = "sliding"
    CHUNKED = "chunked"
    MLA = "mla"
    RECURRENT = "recurrent"


@dataclass(frozen=True, slots=True)
class LayerCache:
    """What one layer keeps. `window` is the size of its window or chunk in tokens, 0 for the other kinds."""

    kind: LayerKind
    window: int = 0


FULL = LayerCache(LayerKind.FULL)
RECURRENT = LayerCache(LayerKind.RECURRENT)

_ENCODERS = (
    "albert", "bert", "camembert", "distilbert", "electra", "gte", "modernbert", "new", "nomic_bert",
    "roberta", "xlm-roberta", "xlm-roberta-xl",
)  # fmt: skip
_MLA_TYPES = (
    "axk1", "bailing_hybrid", "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4", "deepseek_v41",
    "dots3_note", "glm4_moe_lite", "glm5_next", "glm_moe_dsa", "hy_v4", "kimi_k2", "kimi_linear",
    "longcat_flash", "pangu_ultra_moe",
)  # fmt: skip
_WORDS: dict[str, LayerKind | None] = {
    "full_attention": LayerKind.FULL,
    "attention": LayerKind.FULL,
    "sliding_attention": LayerKind.SLIDING,
    "window_attention": LayerKind.SLIDING,
    "chunked_attention": LayerKind.CHUNKED,
    "linear_attention": LayerKind.RECURRENT,
    "mamba": LayerKind.RECURRENT,
    "mamba2": LayerKind.RECURRENT,
    "recurrent": LayerKind.RECURRENT,
    "conv": LayerKind.RECURRENT,
    "mlp": None,
    "moe": None,
}
"""The words for layers in config.json; None for layers that keep nothing. Other words are taken as full."""
_WINDOWS = {"gemma2": 4096, "gemma3": 4096, "gemma3n": 512, "gemma4": 512, "gpt_oss": 128, "mistral": 4096,
            "cohere2": 4096, "exaone4": 4096, "olmo3": 4096}  # fmt: skip
"""The window where config.json has none."""
_SLIDES_ON_REQUEST = ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3")
"""Types whose window is used only with `use_sliding_window`."""
_FULL_EVERY = {"gemma2": 2, "gemma3": 6, "gemma3n": 5, "gemma4": 6, "gpt_oss": 2, "cohere2": 4, "exaone4": 4,
               "olmo3": 4}  # fmt: skip
"""The distance between layers with full attention, the others having a window, where config.json has none."""
_DEFAULT_CHUNK = 8192
_NEMOTRON = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


def layer_caches(config: ModelConfig) -> tuple[LayerCache, ...]:
    """Return what each layer keeps, in the order of layers. Layers that keep nothing of their own, as those
    that share the KV of another, have no entry; one with attention and a recurrent state has two. Empty for
    encoders, which keep nothing. Attention of an unknown kind is taken as full."""
    # Without the suffix of nested configurations.
    text, model_type = config.text, config.text_type.removesuffix("_text")
    if model_type in _ENCODERS or any("Bert" in name for name in config.architectures):
        return ()
    words = list(_words(text, model_type))
    shared = count(text, "num_kv_shared_layers")
    return tuple(_caches(words[: len(words) - shared], text, model_type))


def _caches(words: Sequence[str], text: Mapping[str, Any], model_type: str) -> Iterator[LayerCache]:
    latent = model_type in _MLA_TYPES and text.get("kv_lora_rank") is not None
    window = _window(text, model_type)
    chunk = positive(text.get("attention_chunk_size", _DEFAULT_CHUNK))
    for word in words:
        if word == "hybrid":
            yield from (FULL, RECURRENT)
            continue
        kind = _WORDS.get(word, LayerKind.FULL)
        if kind is None:
            continue
        if kind is LayerKind.SLIDING and window:
            yield LayerCache(kind, window)
        elif kind is LayerKind.CHUNKED and chunk:
            yield LayerCache(kind, chunk)
        elif kind is LayerKind.RECURRENT:
            yield RECURRENT
        else:
            yield LayerCache(LayerKind.MLA) if latent else FULL


def _words(text: Mapping[str, Any], model_type: str) -> Iterator[str]:
    """Yield the word for each layer: as config.json lists them, or by the pattern of the type."""
    layers = count(text, *LAYERS)
    listed = text.get("layer_types") or text.get("layers_block_type")
    if isinstance(listed, list):
        yield from map(str, listed)
    elif model_type in _PATTERNS:
        yield from _PATTERNS[model_type](text, layers)
    elif (every := _full_every(text, model_type)) > 0:
        yield from _one_in(every, layers, "full_attention", "sliding_attention")
    else:
        yield from ["sliding_attention" if _window(text, model_type) else "full_attention"] * layers


def _window(text: Mapping[str, Any], model_type: str) -> int:
    """Return the window of sliding layers in tokens, 0 if the model has none."""
    requested = text.get("use_sliding_window", model_type not in _SLIDES_ON_REQUEST)
    if not requested:
        return 0
    return positive(text.get("sliding_window", _WINDOWS.get(model_type, 0)))


def _full_every(text: Mapping[str, Any], model_type: str) -> int:
    if model_type not in _FULL_EVERY:
        return 0
    stated = text.get("sliding_window_pattern", text.get("_sliding_window_pattern"))
    if isinstance(stated, str):
        return stated.find("G") + 1
    return positive(stated) or _FULL_EVERY[model_type]


def _one_in(every: int, layers: int, special: str, other: str) -> Iterator[str]:
    """Yield `special` for each layer whose number, counted from 1, is a multiple of `every`."""
    yield from (special if number % every == 0 else other for number in range(1, layers + 1))


def _listed(name: str, special: str, other: str) -> Callable[[Mapping[str, Any], int], Iterator[str]]:
    """Return a pattern with `special` for the layers whose indices config.json has under `name`."""

    def pattern(text: Mapping[str, Any], layers: int) -> Iterator[str]:
        stated = text.get(name)
        chosen = range(layers) if stated is None else stated
        yield from (special if at in chosen else other for at in range(layers))

    return pattern


def _every(name: str, default: int) -> Callable[[Mapping[str, Any], int], Iterator[str]]:
    """Return a pattern of recurrent layers with full attention in every nth, as config.json says under
    `name`."""

    def pattern(text: Mapping[str, Any], layers: int) -> Iterator[str]:
        every = count(text, name) or default
        yield from _one_in(every, layers, "full_attention", "linear_attention")

    return pattern


def _all(word: str) -> Callable[[Mapping[str, Any], int], Iterator[str]]:
    return lambda _, layers: iter([word] * layers)


def _gemma4(text: Mapping[str, Any], layers: int) -> Iterator[str]:
    every = _full_every(text, "gemma4")
    # The last layer always has full attention.
    yield from _one_in(every, layers - 1, "full_attention", "sliding_attention")
    yield "full_attention"


def _gpt_oss(_: Mapping[str, Any], layers: int) -> Iterator[str]:
    yield from ("full_attention" if at % 2 else "sliding_attention" for at in range(layers))


def _qwen(text: Mapping[str, Any], layers: int) -> Iterator[str]:
    first = positive(text.get("max_window_layers", 28)) if text.get("use_sliding_window") else layers
    yield from ("sliding_attention" if at >= first else "full_attention" for at in range(layers))


def _llama4(text: Mapping[str, Any], layers: int) -> Iterator[str]:
    every = count(text, "no_rope_layer_interval") or 4
    rotated = text.get("no_rope_layers") or [(at + 1) % every for at in range(layers)]
    yield from ("chunked_attention" if each else "full_attention" for each in rotated)


def _jamba(text: Mapping[str, Any], layers: int) -> Iterator[str]:
    period = count(text, "attn_layer_period") or 8
    offset = positive(text.get("attn_layer_offset", 4))
    yield from ("attention" if at % period == offset else "mamba" for at in range(layers))


def _minimax(_: Mapping[str, Any], layers: int) -> Iterator[str]:
    yield from ("linear_attention" if at % 2 else "full_attention" for at in range(layers))


def _mimo(text: Mapping[str, Any], layers: int) -> Iterator[str]:
    slides = text.get("hybrid_layer_pattern") or [0] * layers
    yield from ("sliding_attention" if each else "full_attention" for each in slides)


def _nemotron(text: Mapping[str, Any], layers: int) -> Iterator[str]:
    pattern = text.get("hybrid_override_pattern") or "M" * layers
    yield from (_NEMOTRON.get(letter, "attention") for letter in pattern)


def _kimi_linear(text: Mapping[str, Any], layers: int) -> Iterator[str]:
    stated = text.get("linear_attn_config") or {}
    # Its indices count from 1.
    full = stated.get("full_attn_layers") or ()
    yield from ("full_attention" if at + 1 in full else "linear_attention" for at in range(layers))


_PATTERNS: dict[str, Callable[[Mapping[str, Any], int], Iterator[str]]] = {
    "bailing_hybrid": _every("layer_group_size", 8),
    "bamba": _listed("attn_layer_indices", "attention", "mamba"),
    "falcon_h1": _all("hybrid"),
    "falcon_mamba": _all("mamba"),
    "gemma4": _gemma4,
    "gpt_oss": _gpt_oss,
    "granitemoehybrid": _all("mamba"),
    "jamba": _jamba,
    "kimi_linear": _kimi_linear,
    "lfm2": _listed("full_attn_idxs", "attention", "conv"),
    "lfm2_moe": _listed("full_attn_idxs", "attention", "conv"),
    "llama4": _llama4,
    "mamba": _all("mamba"),
    "mamba2": _all("mamba"),
    "mimo_v2": _mimo,
    "mimo_v2_flash": _mimo,
    "minimax": _minimax,
    "nemotron_h": _nemotron,
    "plamo2": _all("hybrid"),
    "qwen2": _qwen,
    "qwen3": _qwen,
    "qwen3_5": _every("full_attention_interval", 4),
    "qwen3_5_moe": _every("full_attention_interval", 4),
    "qwen3_next": _every("full_attention_interval", 4),
    "zamba2": _all("hybrid"),
}
