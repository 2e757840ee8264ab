"""How the edge turns text into tokens."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from kvasir.config.spec.base import Spec


class TokenizerSpec(Spec):
    """The edge's tokenizers, one for each model."""

    fast: Literal["auto", "never"] = "auto"
    """`auto` uses a tokenizer many times faster wherever it was proven at start to give the same tokens as
    Hugging Face's, which serves otherwise."""
    prefix_cache_bytes: int = Field(default=16 << 20, ge=0, le=64 << 30)
    """What each model's tokens of earlier turns may take, so that a conversation's next turn tokenizes only
    what is new. 0 keeps none."""
    audit_share: float = Field(default=1 / 256, ge=0.0, le=1.0)
    """The share of prompts that a separate process tokenizes again with Hugging Face's tokenizer, a few of
    them every five minutes. A difference ends the use of the fast one. 0 checks at start only."""
