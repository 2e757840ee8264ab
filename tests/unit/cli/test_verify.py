"""`kvasir verify` tells right answers from wrong ones, and reports what it measured."""

from __future__ import annotations

import argparse
from array import array
from pathlib import Path
from typing import Any

import pytest

from kvasir_platform.bench.client.endpoint import CallResult
from kvasir_platform.cli.main import main, parser
from kvasir_platform.cli.verify.checks import (
    PredictionSample,
    VerifyCheck,
    at_rest,
    hardware_of,
    prediction_check,
    prediction_of,
    prefix_hit,
    same_tokens,
)
from kvasir_platform.cli.verify.client import VerifiedCompletion
from kvasir_platform.cli.verify.curves import LoadPoint, measure_point
from kvasir_platform.cli.verify.report import as_html, as_json, write_report
from kvasir_platform.cli.verify.run import TransferSample, Verification, VerifyOptions

LIKELY = ({5: -0.1, 6: -4.0}, {7: -0.70, 8: -0.74}, {9: -0.2, 3: -2.0})


def answer(
    *tokens: int, likely: tuple[dict[int, float], ...] = LIKELY, cached: int = 0
) -> VerifiedCompletion:
    return VerifiedCompletion("r", tokens, likely, cached)


REFERENCE = answer(5, 7, 9)


@pytest.mark.parametrize(
    ("found", "result", "detail"),
    [
        (answer(5, 7, 9), "pass", "3 tokens are equal"),
        (
            answer(5, 8, 1),
            "pass",
            "token 2 of 3 differs; the reference holds the two 0.040 nats apart, a tie",
        ),
        (answer(6, 7, 9), "fail", "token 1 of 3 differs; the reference holds the two 3.900 nats apart"),
        (answer(5, 7, 4), "fail", "token 3 is 4, and 9 in the reference, which does not hold it for likely"),
        (answer(5, 7), "fail", "2 tokens, and the reference has 3"),
    ],
)
def test_only_a_tie_of_the_reference_excuses_another_token(
    found: VerifiedCompletion, result: str, detail: str
) -> None:
    check = same_tokens("x", REFERENCE, found)
    assert check.result == result
    assert check.detail.startswith(detail)


def test_a_repeated_prompt_that_hits_nothing_fails() -> None:
    assert prefix_hit(answer(cached=960), 1000).result == "pass"
    missed = prefix_hit(answer(), 1000)
    assert (missed.result, missed.detail) == ("fail", "0 of 1,000 prompt tokens came from a cache")


def status(**load: Any) -> dict[str, Any]:
    return {"in_flight": 0, "workers": [{"worker_id": "d-1", "in_flight": 0, "load": load}]}


@pytest.mark.parametrize("field", ["running", "waiting", "kv_blocks_leased", "kv_usage"])
def test_work_that_is_left_on_a_worker_is_named(field: str) -> None:
    assert at_rest(status(running=0, kv_usage=0.0)) is None
    assert at_rest(status(**{field: 2})) == f"d-1: {field} is 2"


def test_calls_and_requests_that_are_left_are_named() -> None:
    assert at_rest({"in_flight": 3, "workers": []}) == "3 calls are in flight"
    left = {"in_flight": 0, "workers": [{"worker_id": "d-1", "in_flight": 1, "load": None}]}
    assert at_rest(left) == "d-1: 1 requests are in flight"


def test_predictions_count_from_the_arrival() -> None:
    sample = prediction_of({"predicted_ttft_s": 0.2, "actual_ttft_s": 0.4, "queued_s": 0.1})
    assert sample is not None
    assert sample.error == pytest.approx(0.25)
    assert prediction_of({"predicted_ttft_s": 0.0, "actual_ttft_s": 0.4}) is None
    assert prediction_check([sample]).detail == "median error 25% over 1 requests"
    assert prediction_check([]).result == "skip"


def test_workers_of_one_kind_are_counted() -> None:
    worker = {"pool": "decode", "engine": "vllm 0.32.0", "hardware": {"device": "NVIDIA H100", "devices": 4}}
    lone = {"pool": "prefill", "engine": None, "hardware": None}
    assert hardware_of([worker, lone, worker]) == [
        "decode: vllm 0.32.0 on 4 × NVIDIA H100 (2 workers)",
        "prefill: unknown engine on unknown device",
    ]


def test_a_load_point_has_percentiles_and_rates() -> None:
    times = iter((0.0, 2.0))

    def stream(number: int) -> CallResult:
        first = 0.1 * (number + 1)
        return CallResult(0.0, 0.0, array("d", [first, first + 0.01, first + 0.04]), output_tokens=8)

    point = measure_point(stream, 2, 4, lambda: next(times))
    assert (point.streams, point.requests) == (2, 4)
    assert (point.ttft_p50_s, point.ttft_p99_s) == pytest.approx((0.2, 0.4))
    assert (point.itl_p50_s, point.itl_p99_s) == pytest.approx((0.01, 0.03))
    assert (point.tokens_per_s, point.requests_per_s) == (16.0, 2.0)


def verification(*checks: VerifyCheck) -> Verification:
    found = Verification(
        "chat",
        "llama <8b>",
        "always",
        ["decode: vllm on H100"],
        VerifyOptions(link_bytes_per_s=1e10),
        "today",
    )
    found.checks += checks
    found.transfers.append(TransferSample(2048, 4_000_000_000, 0.5))
    found.predictions.append(PredictionSample(0.1, 0.2))
    found.curve.append(LoadPoint(1, 4, 0.05, 0.06, 0.004, 0.01, 200.0, 3.0))
    return found


def test_the_report_has_every_figure_in_json_and_html(tmp_path: Path) -> None:
    found = verification(VerifyCheck("tokens", "fail", "token 1 differs"))
    shown = as_json(found)
    assert not shown["passed"]
    assert shown["transfers"][0]["bytes_per_s"] == 8e9
    assert shown["transfers"][0]["link_share"] == pytest.approx(0.8)
    assert shown["predictions"][0]["error"] == pytest.approx(0.5)
    page = as_html(found)
    for text in ("chat: FAILED", "llama &lt;8b&gt;", "token 1 differs", "8.00", "80%", "50.0", "<svg"):
        assert text in page
    assert "http" not in page, "the page needs nothing from elsewhere"
    data, html = write_report(found, tmp_path / "night")
    assert (data.name, html.name) == ("night.json", "night.html")
    assert html.read_text() == page


def test_a_skipped_check_does_not_fail() -> None:
    assert verification(VerifyCheck("x", "pass", ""), VerifyCheck("y", "skip", "")).passed
    assert not verification(VerifyCheck("x", "pass", ""), VerifyCheck("y", "fail", "")).passed


def test_lengths_and_streams_are_numbers_from_one(capsys: pytest.CaptureFixture[str]) -> None:
    args: argparse.Namespace = parser().parse_args(["verify", "--prompt-tokens", "8,16", "--streams", "0"])
    assert (args.prompt_tokens, args.streams) == ((8, 16), ())
    for wrong in ("four", "1,-2", "1,0", "2000"):
        with pytest.raises(SystemExit):
            parser().parse_args(["verify", "--streams", wrong])
    told = capsys.readouterr().err
    assert "numbers separated by commas, as in 1,4,16" in told
    assert "at most 1024 streams at a time" in told


TOKENS = list(range(100, 164))
WHOLE, ROUTED = 7, 8


def serve(gateway: Any, *, routed: int, moved: bool = True, in_flight: int = 0) -> None:
    """A deployment that answers a routed prompt with the token `routed`, and WHOLE on one worker."""
    gateway.answers["/status"] = (
        200,
        {
            "deployment": "chat",
            "ready": True,
            "disaggregation": "always",
            "models": ["m"],
            "in_flight": in_flight,
            "workers": [],
        },
    )
    gateway.answers["/tokenize"] = (200, {"tokens": TOKENS, "max_model_len": 4096})
    decision = {"mode": "disaggregated", "predicted_ttft_s": 0.0, "actual_ttft_s": 0.1, "queued_s": 0.0}
    gateway.answers["/decisions/"] = (200, {"decisions": [decision]})
    timing = {"server-timing": 'transfer;dur=2.00;desc="4096 bytes"'} if moved else {}
    likely = [{f"token_id:{WHOLE}": -0.1, f"token_id:{ROUTED}": -3.0}]
    # The first opens the connection, the third is the reference, and the last repeats the prompt.
    gateway.later["/v1/completions"] = [
        (
            200,
            {
                "choices": [{"token_ids": [token], "logprobs": {"top_logprobs": likely}}],
                "usage": {"prompt_tokens_details": {"cached_tokens": 60}},
            },
            timing,
        )
        for token in (routed, routed, WHOLE, routed)
    ]


def run_verify(gateway: Any, *more: str) -> int:
    return main(["verify", "--prompt-tokens", "64", "--streams", "0", "--address", gateway.address, *more])


def test_a_right_deployment_passes(gateway: Any, capsys: pytest.CaptureFixture[str]) -> None:
    serve(gateway, routed=WHOLE)
    assert run_verify(gateway) == 0
    told = capsys.readouterr().out
    assert "ok  64 tokens, disaggregated: as one worker alone: 1 tokens are equal" in told
    assert "ok  a repeated prompt hits the prefix cache: 60 of 64 prompt tokens" in told
    whole = [body for path, body in gateway.posts if path == "/v1/completions" and "prompt_logprobs" in body]
    assert len(whole) == 1, "one request of each length is the reference"


def test_wrong_tokens_fail_the_command(gateway: Any, capsys: pytest.CaptureFixture[str]) -> None:
    serve(gateway, routed=ROUTED)
    assert run_verify(gateway) == 1
    assert (
        "ERR 64 tokens, disaggregated: as one worker alone: token 1 of 1 differs" in capsys.readouterr().out
    )


def test_a_disaggregated_request_that_moved_nothing_fails(
    gateway: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    serve(gateway, routed=WHOLE, moved=False)
    assert run_verify(gateway) == 1
    assert "ERR 64 tokens, disaggregated: KV was moved" in capsys.readouterr().out


def test_a_deployment_that_is_not_ready_is_not_verified(
    gateway: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.answers["/status"] = (200, {"ready": False, "reason": "no decode worker", "workers": []})
    assert run_verify(gateway) == 1
    assert "the deployment is not ready to serve: no decode worker" in capsys.readouterr().err
