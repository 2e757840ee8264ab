"""System prompts whose KV tenants share: how many of a prompt's tokens belong to one.

The tokens of a declared prompt are those that every chat with it begins with: the common beginning of two
rendered chats that differ after it. A request is compared with these tokens, never with texts, so that
whatever a client sends, only blocks whose tokens are all declared are shared.
"""

from __future__ import annotations

import hashlib
import logging
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from kvasir.config.spec.tenants import SharedPrefixSpec
from kvasir.core.errors import KvasirError
from kvasir.native.salt_places import salt_after

_log = logging.getLogger(__name__)

Tokenize = Callable[[str], "Sequence[array[int]]"]
"""The tokens of two or more prompts to one model that begin with a text and differ after it, for each way in
which it can begin one; raises KvasirError where the model takes no such prompts."""


class _Known(NamedTuple):
    """The tokens of a declared prefix, as bytes, and whose it is (None: all tenants')."""

    tokens: bytes
    tenants: frozenset[str] | None


class SharedPrefixes:
    """The declared prefixes of a deployment, for its models by name."""

    def __init__(self, specs: Iterable[SharedPrefixSpec], models: dict[str, Sequence[Tokenize]]) -> None:
        self._models = models
        self._known: dict[str, tuple[_Known, ...]] = dict.fromkeys(models, ())
        self._awaited: dict[str, SharedPrefixSpec] = {}
        for spec in specs:
            if spec.text is not None:
                self._add(spec, spec.text)
            elif spec.sha256 is not None:
                self._awaited[spec.sha256] = spec

    @property
    def awaits_texts(self) -> bool:
        """Whether prefixes are declared by hashes whose texts no request has had."""
        return bool(self._awaited)

    def see(self, tenant: str, text: str) -> None:
        """Take the text of a prefix that is declared by its hash from a request of `tenant`, if this system
        prompt is one."""
        digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
        spec = self._awaited.get(digest)
        if spec is not None and (spec.tenants is None or tenant in spec.tenants):
            del self._awaited[digest]
            self._add(spec, text)

    def salt(self, tenant: str, model: str, tokens: array[int], salt: str) -> str:
        """Return the salt of a request: `salt`, or one that begins after the prefix that the tenant
        shares."""
        raw = memoryview(tokens).cast("B")
        for known in self._known[model]:
            size = len(known.tokens)
            if raw[:size] == known.tokens and (known.tenants is None or tenant in known.tenants):
                return salt_after(size // tokens.itemsize, salt)
        return salt

    def _add(self, spec: SharedPrefixSpec, text: str) -> None:
        tenants = None if spec.tenants is None else frozenset(spec.tenants)
        for model, ways in self._models.items():
            found = {_common(tokenize, text) for tokenize in ways}
            known = [_Known(tokens, tenants) for tokens in found if tokens]
            # The longest that a prompt begins with counts.
            self._known[model] = tuple(
                sorted((*self._known[model], *known), key=lambda each: len(each.tokens), reverse=True)
            )
            tokens = max((len(each.tokens) for each in known), default=0) // array("I").itemsize
            _log.info(
                "tenants share the KV of a prefix",
                extra={"prefix": spec.name, "model": model, "tokens": tokens},
            )


def _common(tokenize: Tokenize, text: str) -> bytes:
    """Return the tokens with which all prompts begin that begin with a text."""
    try:
        first, *others = tokenize(text)
    except KvasirError:
        return b""
    size = len(first)
    for other in others:
        size = min(size, len(other))
        size = next((at for at in range(size) if first[at] != other[at]), size)
    return first[:size].tobytes()
