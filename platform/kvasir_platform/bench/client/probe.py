"""What is learned of a server before load is put on it: the fields that it accepts, and how words become
tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvasir.core.errors import UpstreamError
from kvasir_platform.bench.client.dialect import Dialect
from kvasir_platform.bench.client.endpoint import BenchCall, CallResult
from kvasir_platform.bench.client.prompts import TokenScale, fitted, probe_text

_PROBE_TOKENS = 4
_SHORT_WORDS = 32
_LONG_WORDS = 512
_USUAL = TokenScale(per_word=1.1)
"""What is assumed of a server that does not count tokens."""


class Poster(Protocol):
    """Sends one call's body to a path."""

    async def post(self, path: str, body: Mapping[str, Any], *, streams: bool) -> CallResult:
        """Errors are in the result."""
        ...


@dataclass(frozen=True, slots=True)
class BenchModel:
    """A model as its server lists it, with its longest request in tokens, None if the server does not say."""

    name: str
    context: int | None = None


@dataclass(frozen=True, slots=True)
class ProbedServer:
    """What was learned of the server of `model`. `counts_tokens`: it says how many tokens prompts have."""

    model: BenchModel
    dialect: Dialect
    scale: TokenScale
    counts_tokens: bool


async def probe_server(
    poster: Poster, model: BenchModel, dialect: Dialect, more: Mapping[str, Any], *, salt: int
) -> ProbedServer:
    """Probe with a few short calls. Raises UpstreamError if the server refuses even the plainest call."""

    async def ask(words: int, number: int) -> CallResult:
        call = BenchCall(probe_text(words, salt + number), _PROBE_TOKENS, dialect.api == "embeddings")
        body = dialect.body(model.name, call, more)
        return await poster.post(dialect.path, body, streams=bool(body.get("stream")))

    short, number = await ask(_SHORT_WORDS, 0), 1
    while short.error:
        narrowed = _narrowed(dialect, short)
        if narrowed is None:
            raise UpstreamError(f"{dialect.path} refused a probe: {short.error}: {short.detail}")
        dialect = narrowed
        short, number = await ask(_SHORT_WORDS, number), number + 1
    # A vocabulary of few tokens has several for a word.
    most = _LONG_WORDS if model.context is None else model.context // 4
    many = max(2 * _SHORT_WORDS, min(_LONG_WORDS, most))
    long = await ask(many, number)
    samples = [
        (words, found.prompt_tokens)
        for words, found in ((_SHORT_WORDS, short), (many, long))
        if found.prompt_tokens is not None and not found.error
    ]
    try:
        return ProbedServer(model, dialect, fitted(samples), counts_tokens=True)
    except ValueError:
        return ProbedServer(model, dialect, _USUAL, counts_tokens=False)


def _narrowed(dialect: Dialect, found: CallResult) -> Dialect | None:
    kind, _, status = found.error.partition("_")
    return dialect.narrowed(int(status), found.detail) if kind == "http" else None


def chosen_model(
    listed: Sequence[Mapping[str, Any]], wanted: str | None, say: Callable[[str], None]
) -> BenchModel:
    """The model to load, of those that /v1/models lists. Raises UpstreamError if it is not there."""
    names = [str(each["id"]) for each in listed]
    if not names:
        raise UpstreamError("the server lists no models; start one, or name another URL")
    if wanted is not None and wanted not in names:
        raise UpstreamError(f"--model {wanted}: the server lists {', '.join(names)}")
    if wanted is None and len(names) > 1:
        say(f"model {names[0]}, the first of {len(names)}; --model names another")
    found = listed[names.index(wanted) if wanted is not None else 0]
    context = found.get("max_model_len")
    return BenchModel(str(found["id"]), context if isinstance(context, int) and context > 0 else None)
