"""The number of positions that a model supports, derived from its configuration as vLLM derives it.

Follows `derive_max_model_len_and_key` and `_get_and_verify_max_len` of vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvasir.checkpoint.default_positions import DEFAULT_POSITIONS

POSITION_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "max_target_positions",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
_DEFAULTED = {"max_position_embeddings", "n_positions"}
_ALREADY_SCALED = {"su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling"}
"""Types of RoPE with which the positions in config.json include the scaling."""


def supported_positions(text: Mapping[str, Any], model_type: str) -> int | None:
    """Return the positions that a text configuration of `model_type` states, or that are the type's default,
    scaled by its RoPE. None if neither is known."""
    stated = [value for key in POSITION_KEYS if (value := _count(text.get(key))) is not None]
    if not _DEFAULTED & text.keys() and model_type in DEFAULT_POSITIONS:
        stated.append(DEFAULT_POSITIONS[model_type])
    if not stated:
        return None
    positions = _count(text.get("model_max_length")) or min(stated)
    return int(positions * _rope_factor(text, model_type))


def unscaled_positions(text: Mapping[str, Any]) -> int | None:
    """Return the positions up to which a model with LongRoPE is as good as without it, None for other models.
    vLLM does not exceed them unless it is told to."""
    if not any(_rope_type(each) in ("longrope", "su") for each in _rope_parameters(text)):
        return None
    return _count(text.get("original_max_position_embeddings"))


def _rope_factor(text: Mapping[str, Any], model_type: str) -> float:
    # The positions of Gemma 3 include its linear scaling.
    if "gemma3" in model_type:
        return 1.0
    factor = 1.0
    for each in _rope_parameters(text):
        stated = each.get("factor", factor)
        if _rope_type(each) not in _ALREADY_SCALED and isinstance(stated, int | float):
            factor = float(stated)
    return factor


def _rope_parameters(text: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the parameters of RoPE: one mapping, or one for each type of layer."""
    parameters = text.get("rope_scaling") or text.get("rope_parameters")
    if not isinstance(parameters, dict):
        return
    nested = [each for each in parameters.values() if isinstance(each, dict)]
    yield from nested or [parameters]


def _rope_type(parameters: Mapping[str, Any]) -> str:
    return str(parameters.get("rope_type") or parameters.get("type") or "default")


def _count(value: object) -> int | None:
    return (
        int(value) if isinstance(value, int | float) and not isinstance(value, bool) and value > 0 else None
    )
