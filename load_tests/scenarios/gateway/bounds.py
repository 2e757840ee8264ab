"""What the costliest request costs: time of the event loop for a body, and of an engine's step for a mask.

Bodies are the costliest values of every field that a client can send (tests/kit/lab/costly_bodies.py):
each is counted as it arrives, decoded and rendered as on the event loop; what is rendered in a thread is left
out. Masks are those of vLLM's grammar compiler with a vocabulary of realistic size, for 100 tokens of output
that follow the rule: of patterns and grammars that the gateway accepts, and of some that it refuses. Times
are of the processor.

    make bench-bounds
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import xgrammar
from tests.kit.lab.costly_bodies import PIECE, bodies, handled
from transformers import AutoTokenizer

from kvasir.core.errors import RequestError
from kvasir_platform.gateway.http.body import Body
from load_tests.options import no_options
from load_tests.report import Row, write
from load_tests.vocabulary import large_model

BODY_MS, MASK_MS = 20.0, 200.0
STEPS = 100
PATIENCE_S = 5.0
REPEATS = 3
REFUSED = (
    ("((a{0,1000}){0,1000}){0,1000}", "a"),
    ("((a*)*)*", "a"),
    ("(a{0,20}){0,20}b{0,500}", "a"),
    (r"([a-z]+ ?)+\.", "a"),
)
ACCEPTED = (
    ("a{0,100000}", "a"),
    ("(a{0,7}){0,7}b", "a"),
    (r"[a-z]+( [a-z]+)*\.", "a"),
    ("(a?b?)*c", "a"),
    (".{0,50}a.{0,50}", "a"),
    (r"([^,]+, )*[^,]+", "a"),
)


def main() -> None:
    """Measure, and write load_tests/reports/bounds.json."""
    no_options(__doc__)
    rows = [*_body_rows(), *_arrival_rows(), *_mask_rows()]
    print(write("bounds", "make bench-bounds", rows))


def _body_rows() -> Iterator[Row]:
    worst = {True: (0.0, ""), False: (0.0, "")}
    for name, kind, data in bodies():
        samples = []
        for _ in range(REPEATS):
            begun, accepted = time.process_time(), True
            try:
                handled(kind, data)
            except RequestError:
                accepted = False
            samples.append((time.process_time() - begun) * 1e3)
        worst[accepted] = max(worst[accepted], (min(samples), name))
    for accepted, (spent, name) in worst.items():
        row = f"event loop, costliest body that is {'accepted' if accepted else 'refused'}"
        yield Row(row, round(spent, 1), "ms", "lower", target=BODY_MS, note=name)


def _arrival_rows() -> Iterator[Row]:
    for name, data in (
        ("7.8 MB of empty arrays, until it is refused", b'{"a":[' + b"[]," * 2_600_000 + b"[]]}"),
        ("8 MiB of text, longest piece", b'{"a":"' + b"x[i] = {a, b};\\n" * 500_000 + b'"}'),
    ):
        body, longest = Body(), 0.0
        for at in range(0, len(data), PIECE):
            begun, refused = time.process_time(), False
            try:
                body.add(data[at : at + PIECE])
            except RequestError:
                refused = True
            longest = max(longest, (time.process_time() - begun) * 1e3)
            if refused:
                break
        yield Row(f"event loop, {name}", round(longest, 2), "ms", "lower", target=BODY_MS)


def _mask_rows() -> Iterator[Row]:
    tokenizer = AutoTokenizer.from_pretrained(str(large_model()))
    size = len(tokenizer)
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=size)
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    for accepted, patterns in ((True, ACCEPTED), (False, REFUSED)):
        for pattern, text in patterns:
            longest = _longest_mask(compiler, size, pattern, tokenizer.encode(text)[-1])
            name = f"mask, {'accepted' if accepted else 'refused'}: {pattern}"
            yield Row(name, round(longest, 2), "ms", "lower", target=MASK_MS if accepted else None)


def _longest_mask(compiler: xgrammar.GrammarCompiler, size: int, pattern: str, token: int) -> float:
    """Return the longest mask, in milliseconds, of up to STEPS tokens or PATIENCE_S."""
    matcher = xgrammar.GrammarMatcher(compiler.compile_regex(pattern))
    mask = xgrammar.allocate_token_bitmask(1, size)
    longest, all_of_it = 0.0, 0.0
    for _ in range(STEPS):
        begun = time.process_time()
        matcher.fill_next_token_bitmask(mask, 0)
        spent = time.process_time() - begun
        longest, all_of_it = max(longest, spent), all_of_it + spent
        if all_of_it > PATIENCE_S or not matcher.accept_token(token):
            break
    return longest * 1e3


if __name__ == "__main__":
    main()
