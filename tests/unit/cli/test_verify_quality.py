"""`kvasir verify --quality` tells a deployment that got worse from one that did not."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvasir.core.errors import ConfigError, UpstreamError
from kvasir_platform.cli.common.gateway_site import Site
from kvasir_platform.cli.main import main
from kvasir_platform.cli.verify.client import VerifyClient
from kvasir_platform.cli.verify.held_out import PIECE_CHARACTERS, HeldOutSet, read_held_out, windows_of
from kvasir_platform.cli.verify.limits import QualityLimits, quality_checks
from kvasir_platform.cli.verify.scores import (
    QualityFigures,
    ScoredToken,
    agrees,
    compare,
    divergence,
    perplexity,
)

HALF, QUARTER, EIGHTH = (math.log(1 / each) for each in (2, 4, 8))


def test_perplexity_is_the_number_of_equally_likely_tokens() -> None:
    assert perplexity([ScoredToken(QUARTER, {})] * 3) == pytest.approx(4)
    assert perplexity([ScoredToken(HALF, {}), ScoredToken(EIGHTH, {})]) == pytest.approx(4)
    assert math.isfinite(perplexity([ScoredToken(-9999.0, {})])), "what an engine returns for no number"


def test_divergence_is_that_of_the_listed_tokens_and_one_rest() -> None:
    reference = {1: HALF, 2: QUARTER}
    assert divergence(reference, reference) == 0
    found = {1: QUARTER, 2: HALF}
    assert divergence(reference, found) == pytest.approx(0.25 * math.log(2))
    # Token 2 is not listed by the other: it counts in the rest of both.
    lone = {1: QUARTER, 3: HALF}
    assert divergence(reference, lone) == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3))
    assert divergence(reference, {1: -9999.0, 2: QUARTER}) > 1000


def test_a_tie_of_the_baseline_agrees_with_either_token() -> None:
    assert agrees({1: QUARTER, 2: QUARTER}, {2: HALF, 1: QUARTER})
    assert not agrees({1: HALF, 2: QUARTER}, {2: HALF, 1: QUARTER})
    assert not agrees({1: HALF}, {3: HALF})


def test_each_limit_fails_alone() -> None:
    sure = [ScoredToken(HALF, {1: HALF, 2: QUARTER})] * 2
    unsure = [ScoredToken(EIGHTH, {2: HALF, 1: EIGHTH}), sure[1]]
    compared = compare("before", sure, unsure)
    assert (compared.perplexity, compared.perplexity_ratio, compared.agreement) == pytest.approx((2, 2, 0.5))

    def results(**limits: float) -> list[str]:
        figures = QualityFigures("set", 2, False, perplexity(unsure), compared)
        loose = {"perplexity": 10.0, "perplexity_ratio": 10.0, "agreement": 0.1, "kl_nats": 10.0}
        return [each.result for each in quality_checks(figures, QualityLimits(**{**loose, **limits}))]

    assert results() == ["pass"] * 4
    assert results(perplexity=3.9) == ["fail", "pass", "pass", "pass"]
    assert results(perplexity_ratio=1.9) == ["pass", "fail", "pass", "pass"]
    assert results(agreement=0.6) == ["pass", "pass", "fail", "pass"]
    assert results(kl_nats=0.1) == ["pass", "pass", "pass", "fail"]


def words(text: str, special: bool) -> list[int]:
    """A tokenizer with a token for each word, and 1 before a prompt."""
    return [1] * special + [2 + len(word) for word in text.split()]


def test_windows_fit_the_context_and_the_wanted_number_of_tokens() -> None:
    found = HeldOutSet("set", ("a bb ccc dddd eeeee", "lone", "a bb"))
    made = windows_of(found, words, 100, 4)
    assert [each.tokens for each in made.windows] == [(1, 3, 4), (1, 5, 6), (1, 3, 4)]
    assert {each.first for each in made.windows} == {1}
    assert not made.left_out
    few = windows_of(found, words, 3, 4)
    assert [each.tokens for each in few.windows] == [(1, 3, 4)]
    assert few.left_out
    plain = windows_of(found, lambda text, _: words(text, False), 100, 512)
    assert [each.tokens for each in plain.windows] == [(3, 4, 5, 6, 7), (3, 4)]


def test_long_texts_are_tokenized_in_pieces_that_end_with_a_line() -> None:
    seen: list[str] = []

    def tokenize(text: str, special: bool) -> list[int]:
        seen.append(text)
        return words(text, special)

    text = "word word\n" * PIECE_CHARACTERS
    windows_of(HeldOutSet("set", (text,)), tokenize, 10 * PIECE_CHARACTERS, 512)
    pieces = seen[2:]
    assert "".join(pieces) == text
    assert max(map(len, pieces)) <= PIECE_CHARACTERS
    assert all(each.endswith("\n") for each in pieces)


def test_a_set_is_a_text_or_lines_of_json(tmp_path: Path) -> None:
    plain, lines = tmp_path / "set.txt", tmp_path / "set.jsonl"
    plain.write_text("one\ntwo\n")
    lines.write_text('{"text": "one"}\n\n{"text": "two", "more": 1}\n')
    assert read_held_out(plain) == HeldOutSet("set.txt", ("one\ntwo\n",))
    assert read_held_out(lines) == HeldOutSet("set.jsonl", ("one", "two"))
    assert len(read_held_out(None).texts) >= 10


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("set.jsonl", b'{"text": "a"}\n{"prompt": "b"}\n', "line 2 is not of the form"),
        ("set.jsonl", b"words\n", "line 1 is no JSON"),
        ("set.txt", b"\xff\xfe", "not UTF-8 at byte 0"),
        ("set.txt", b" \n", "no text in it"),
        ("set.txt", b"x" * ((16 << 20) + 1), "larger than 16 MiB"),
    ],
)
def test_a_set_that_cannot_be_used_is_named(name: str, content: bytes, told: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=told) as raised:
        read_held_out(path)
    assert str(path) in raised.value.message
    with pytest.raises(ConfigError, match="No such file"):
        read_held_out(tmp_path / "absent")


VOCABULARY = 100
Chances = Callable[[int], float]


def serve(gateway: Any, chance_of: dict[str, Chances]) -> None:
    """A deployment of models; `chance_of` gives the probability that each gives to the token of the text. It
    has a token for each word, and lists the token itself and one other."""
    status = {
        "deployment": "chat",
        "ready": True,
        "disaggregation": "never",
        "models": list(chance_of),
        "in_flight": 0,
        "workers": [],
    }
    gateway.answers["/status"] = (200, status)
    decision = {"mode": "aggregated", "predicted_ttft_s": 0.0, "actual_ttft_s": 0.1, "queued_s": 0.0}
    gateway.answers["/decisions/"] = (200, {"decisions": [decision]})

    def tokenize(body: Any) -> Any:
        tokens = words(body["prompt"], body.get("add_special_tokens", True))
        return (200, {"tokens": tokens, "max_model_len": 256})

    def complete(body: Any) -> Any:
        choice: dict[str, Any] = {"token_ids": [7], "logprobs": {"top_logprobs": [{"token_id:7": -0.1}]}}
        if body.get("prompt_logprobs"):
            chance = chance_of[body["model"]]
            choice["prompt_logprobs"] = [
                each and listed(token, chance(number))
                for number, (token, each) in enumerate(zip(body["prompt"], [None, *[1] * 9999], strict=False))
            ]
        usage = {"prompt_tokens_details": {"cached_tokens": 64}}
        return (200, {"choices": [choice], "usage": usage})

    gateway.answers["/tokenize"] = tokenize
    gateway.answers["/v1/completions"] = complete


def listed(token: int, chance: float) -> dict[str, Any]:
    other = 0.9 * (1 - chance)
    return {
        str(token): {"logprob": math.log(chance)},
        str(token + VOCABULARY): {"logprob": math.log(other)},
    }


def good(_: int) -> float:
    return 0.6


def close(number: int) -> float:
    return 0.55 if number % 2 else 0.65


def worse(number: int) -> float:
    return 0.2 if number % 4 == 0 else 0.6


def run_verify(gateway: Any, *more: str) -> int:
    shared = ("--prompt-tokens", "64", "--streams", "0", "--address", gateway.address)
    return main(["verify", *shared, *more])


def saved(gateway: Any, tmp_path: Path) -> Path:
    serve(gateway, {"m": good})
    assert run_verify(gateway, "--quality", "--report", str(tmp_path / "before")) == 0
    return tmp_path / "before.quality.json"


def test_without_a_baseline_the_perplexity_is_reported(
    gateway: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    baseline = saved(gateway, tmp_path)
    told = capsys.readouterr().out
    assert "--  perplexity of held-out text: 1.667 over" in told
    found = json.loads((tmp_path / "before.json").read_text())
    assert found["quality"]["perplexity"] == pytest.approx(1 / 0.6)
    assert found["options"]["quality_limits"]["kl_nats"] == 0.1
    assert "scored" not in found
    assert "Accuracy on held-out text" in (tmp_path / "before.html").read_text()
    windows = json.loads(baseline.read_text())["windows"]
    assert sum(len(each["logprobs"]) for each in windows) == found["quality"]["tokens"]


def test_a_perplexity_above_its_limit_fails(gateway: Any, capsys: pytest.CaptureFixture[str]) -> None:
    serve(gateway, {"m": good})
    assert run_verify(gateway, "--max-perplexity", "1.7") == 0
    assert run_verify(gateway, "--max-perplexity", "1.6") == 1
    assert "ERR perplexity of held-out text: 1.667" in capsys.readouterr().out


def test_a_deployment_that_got_worse_fails_against_what_it_was(
    gateway: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    baseline = saved(gateway, tmp_path)
    assert run_verify(gateway, "--quality-baseline", str(baseline)) == 0
    told = capsys.readouterr().out
    assert "ok  most likely tokens as in the baseline: at 100.00% of positions" in told
    assert "ok  KL divergence from the baseline: 0.00000 nats" in told
    serve(gateway, {"m": close})
    assert run_verify(gateway, "--quality-baseline", str(baseline)) == 0
    assert run_verify(gateway, "--quality-baseline", str(baseline), "--max-kl", "0.001") == 1
    capsys.readouterr()
    serve(gateway, {"m": worse})
    report = tmp_path / "after"
    assert run_verify(gateway, "--quality-baseline", str(baseline), "--report", str(report)) == 1
    told = capsys.readouterr().out
    assert "ERR perplexity against the baseline: 1.3" in told
    assert "ERR most likely tokens as in the baseline: at 7" in told
    found = json.loads((tmp_path / "after.json").read_text())
    assert found["quality"]["comparison"]["baseline"].startswith("m of chat, ")
    assert "SAME TOP TOKEN" in (tmp_path / "after.html").read_text()


def test_another_gateway_or_model_can_be_the_baseline(
    gateway: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    serve(gateway, {"m": worse, "original": good})
    assert run_verify(gateway, "--quality-baseline-model", "original") == 1
    assert "ERR most likely tokens as in the baseline" in capsys.readouterr().out
    assert run_verify(gateway, "--quality-baseline", gateway.address) == 0
    assert f"scored by m of chat at {gateway.address}" in capsys.readouterr().out


def test_text_is_read_up_to_the_wanted_number_of_tokens(
    gateway: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    serve(gateway, {"m": good})
    path = tmp_path / "set.txt"
    path.write_text("word " * 1000)
    assert run_verify(gateway, "--quality-set", str(path), "--quality-tokens", "300") == 0
    assert "over 300 tokens of set.txt, which has more" in capsys.readouterr().out
    # Texts are scored at the same time, so they arrive in any order.
    scored = [len(body["prompt"]) for _, body in gateway.posts if body.get("prompt_logprobs")]
    assert sorted(scored) == [47, 255], "with a special token each, within the context"


@pytest.mark.parametrize(
    ("refusals", "waits", "ends_well"), [(2, [1.0, 3.0], True), (9, [1.0, 3.0, 3.0], False)]
)
def test_a_busy_gateway_is_asked_again_for_as_long_as_an_answer_may_take(
    refusals: int, waits: list[float], ends_well: bool, gateway: Any
) -> None:
    serve(gateway, {"m": good})
    busy = {"error": {"message": "the request would wait for about 0.9 s"}}
    gateway.later["/v1/completions"] = [
        (503, busy, {"retry-after": "3"} if number else {}) for number in range(refusals)
    ]
    paused: list[float] = []
    client = VerifyClient(Site(gateway.address), "m", 8.0, paused.append)
    if ends_well:
        assert len(client.score((1, 4, 5), 1)) == 2
    else:
        with pytest.raises(UpstreamError, match="answered 503 to /v1/completions: the request would wait"):
            client.score((1, 4, 5), 1)
    assert paused == waits


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--max-kl", "1"), "--max-kl needs --quality-baseline"),
        (("--quality-baseline", "absent.json"), "--quality-baseline absent.json: No such file"),
        (("--quality-baseline", "no/file"), "--quality-baseline no/file: no such file, and no HOST:PORT"),
        (("--quality-baseline-model", "x"), "--quality-baseline-model x: http://ADDRESS serves m"),
        (("--quality-baseline", "REPORT"), "no scores; name the PREFIX.quality.json"),
        (("--quality-baseline", "SCORES", "--quality-tokens", "9"), "are of other tokens"),
        (("--quality-baseline", "DAMAGED"), "damaged: 1 scores for 3 tokens"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    arguments: tuple[str, ...],
    told: str,
    gateway: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    scores = saved(gateway, tmp_path)
    damaged = tmp_path / "damaged.json"
    window = {"tokens": [1, 2, 3], "opening": 0, "logprobs": [-1], "likely": [{"2": -1}]}
    damaged.write_text(json.dumps({"format": "kvasir-quality-1", "name": "m", "windows": [window]}))
    places = {"SCORES": str(scores), "DAMAGED": str(damaged), "REPORT": str(tmp_path / "before.json")}
    assert run_verify(gateway, *(places.get(each, each) for each in arguments)) == 2
    assert told.replace("ADDRESS", gateway.address) in capsys.readouterr().err


def test_numbers_outside_their_range_are_usage_errors(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in (("--quality-tokens", "131073"), ("--quality-tokens", "1"), ("--max-kl", "nan")):
        with pytest.raises(SystemExit):
            main(["verify", *wrong])
    assert "a whole number from 2 to 131072" in capsys.readouterr().err
