"""Text output about workers and decisions on the command line."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from kvasir.ports.router import CandidateRecord, DecisionRecord, PhaseRecord
from kvasir_platform.cli.commands.status.report import worker_row
from kvasir_platform.cli.main import main

WORKER: dict[str, Any] = {
    "worker_id": "decode-7f",
    "address": "127.0.0.1:1",
    "pool": "decode",
    "role": "decode",
    "state": "ready",
    "reason": "",
    "in_flight": 2,
    "load": {"running": 1, "waiting": 3, "kv_usage": 0.25},
    "kv": {
        "state": "catching_up", "reason": "a batch is missing", "for_s": 0.2, "epoch": 1, "sequence": 9,
        "blocks": 12345, "predicted_blocks": 67, "resyncs": 4, "error_ratio": 0.0,
    },
    "health": {"state": "healthy", "reason": "", "for_s": 0.0, "share": 1.0, "ejections": 0, "panic": False},
}  # fmt: skip


def place(worker_id: str, chosen: bool, total_s: float, cached: int = 0) -> CandidateRecord:
    facts = {"cached_tokens": float(cached), "cpu_tokens": 128.0, "disk_tokens": 0.0, "streams": 3.0}
    terms = {"queue_s": total_s / 4, "stall_s": 0.0, "prefill_s": total_s * 3 / 4}
    return CandidateRecord(worker_id, 0, "pool", "exact", facts, terms, total_s, chosen)


RECORD = DecisionRecord(
    request_id="abc-12345678",
    policy="cost",
    reason="disaggregated_prefix",
    mode="disaggregated",
    decided_s=10.0,
    decided_in_s=41e-6,
    attempt=1,
    prompt_tokens=1501,
    expected_output_tokens=64,
    slo="chat",
    prefill_worker="p-1",
    decode_worker="d-0",
    predicted_cached_tokens=1024,
    predicted_ttft_s=0.032,
    parts=(
        PhaseRecord("prefill", "s", (place("p-1", True, 0.012, 1024), place("p-0", False, 0.0803))),
        PhaseRecord("decode", "s", (place("d-0", True, 0.35),)),
        PhaseRecord("whole", "s", (place("d-0", False, 0.5),)),
    ),
    queued_s=0.0005,
    slo_ttft_s=2.0,
    slo_itl_s=0.1,
    outcome="ok",
    actual_cached_tokens=992,
    actual_ttft_s=0.0351,
    actual_itl_s=0.0041,
    slo_met=True,
)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVASIR_HOME", str(tmp_path))
    monkeypatch.delenv("KVASIR_API_KEY", raising=False)


def answer(gateway: Any, *records: DecisionRecord) -> None:
    decisions = [asdict(record) for record in records]
    gateway.answers["/decisions/abc"] = (200, {"request_id": "abc", "decisions": decisions})


def said(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What was printed, its runs of spaces made one."""
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


def test_get_workers_shows_what_each_holds_and_how_well_that_is_known(
    gateway: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.answers["/status"] = (200, {"workers": [WORKER]})
    assert main(["get", "workers", "--address", gateway.address]) == 0
    assert said(capsys) == [
        "WORKER POOL ROLE STATE HEALTH KV BLOCKS PREDICTED RESYNCS IN FLIGHT RUNNING WAITING KV USED TIERS "
        "REASON",
        "decode-7f decode decode ready healthy catching_up 12,345 67 4 2 1 3 25% - a batch is missing",
    ]


def test_a_worker_that_does_another_pools_work_is_shown_with_what_it_does(
    gateway: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    lent = WORKER | {"assigned": "prefill"}
    gateway.answers["/status"] = (200, {"workers": [lent]})
    main(["get", "workers", "--address", gateway.address])
    assert said(capsys)[1].startswith("decode-7f decode prefill ready ")
    assert worker_row(lent)[-1].startswith("does prefill work")
    assert "does" not in worker_row(WORKER)[-1]


def test_a_worker_is_shown_with_what_is_known_of_its_place(
    gateway: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    locality = {"node": "n7", "zone": "eu-1a", "rack": "", "nvlink_domain": "d1.0", "nics": []}
    workers = [WORKER | {"locality": locality}, WORKER | {"locality": None}]
    gateway.answers["/status"] = (200, {"workers": workers})
    main(["get", "workers", "--address", gateway.address])
    head, placed, other = said(capsys)
    assert head.endswith("TIERS PLACE REASON")
    assert placed.endswith("25% - eu-1a/n7/NVLink d1.0 a batch is missing")
    assert other.endswith("25% - - a batch is missing")


def test_a_decision_shows_the_link_to_each_decode_worker_if_any_is_known(
    gateway: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    near, far = replace(place("d-0", True, 0.35), link="rack"), replace(place("d-1", False, 0.5), link="zone")
    answer(gateway, replace(RECORD, parts=(RECORD.parts[0], PhaseRecord("decode", "s", (near, far)))))
    assert main(["explain", "abc", "--address", gateway.address]) == 0
    lines = said(capsys)
    assert [line for line in lines if "LINK" in line] == [
        "WORKER KV LINK IN TIERS STREAMS queue prefill TOTAL"
    ]
    assert "* d-0 exact rack 128 3 87.50 262.50 350.00" in lines
    assert "d-1 exact zone 128 3 125.00 375.00 500.00" in lines


def test_a_worker_that_has_said_nothing_yet_is_shown_all_the_same(
    gateway: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = {"worker_id": "w", "pool": "p", "state": "connecting", "reason": "refused", "in_flight": 0}
    bare |= {"role": None, "load": None, "kv": None}
    gateway.answers["/status"] = (200, {"workers": [bare]})
    assert main(["get", "workers", "--address", f"http://{gateway.address}/"]) == 0
    assert said(capsys)[1] == "w p - connecting - - - - - 0 - - - - refused"


def test_get_workers_says_how_far_each_is_trusted_and_why(
    gateway: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def worker(**health: object) -> dict[str, Any]:
        return WORKER | {"kv": None, "health": health}

    found = [
        worker(state="ejected", reason="3 requests in a row failed", for_s=1.53, share=0.0, panic=False),
        worker(state="ejected", reason="it failed again", for_s=4.0, share=1.0, panic=True),
        worker(state="slow_start", reason="it has just joined", for_s=6.0, share=0.37, panic=False),
    ]
    gateway.answers["/status"] = (200, {"workers": found})
    assert main(["get", "workers", "--address", gateway.address]) == 0
    rows = [line.removeprefix("decode-7f decode decode ready ") for line in said(capsys)[1:]]
    assert rows == [
        "ejected 1.5s - - - - 2 1 3 25% - 3 requests in a row failed",
        "ejected 4.0s (panic) - - - - 2 1 3 25% - it failed again",
        "slow_start 37% - - - - 2 1 3 25% - it has just joined",
    ]


def test_tiers_are_shown_with_how_full_they_are_and_those_in_trouble_with_why() -> None:
    tiers = [
        {"medium": 1, "bytes_used": 810, "bytes_capacity": 1000, "trouble": ""},
        {"medium": 2, "bytes_used": 5, "bytes_capacity": 1000, "trouble": "no space left; free some"},
        {"medium": 3, "bytes_used": 70, "bytes_capacity": 0, "trouble": ""},
    ]
    worker = WORKER | {"load": WORKER["load"] | {"tiers": tiers}, "reason": "draining"}
    assert worker_row(worker)[-2:] == (
        "cpu 81%, disk 0%!, remote",
        "draining; disk: no space left; free some",
    )


def test_a_workers_tiers_are_in_the_table_of_workers(
    gateway: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    tiers = [{"medium": 3, "bytes_used": 7, "bytes_capacity": 0, "trouble": "no answer within 8 ms"}]
    worker = WORKER | {"load": WORKER["load"] | {"tiers": tiers}}
    gateway.answers["/status"] = (200, {"workers": [worker]})
    main(["get", "workers", "--address", gateway.address])
    row = said(capsys)[1]
    assert row.endswith("1 3 25% remote! a batch is missing; remote: no answer within 8 ms")


def test_get_workers_in_json_is_what_the_gateway_said(
    gateway: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.answers["/status"] = (200, {"workers": [WORKER]})
    assert main(["get", "workers", "--address", gateway.address, "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == [WORKER]


def test_explain_tells_the_choice_and_why_in_one_sentence(
    gateway: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(gateway, RECORD)
    assert main(["explain", "abc", "--address", gateway.address]) == 0
    lines = said(capsys)
    assert lines[0] == (
        "abc-12345678: ok, policy cost, disaggregated_prefix, decided in 41 µs, 0.5 ms after it came"
    )
    assert lines[1] == (
        "Prefilled on p-1, the best with 12.00 ms (next p-0: 80.30 ms), and decoded on d-0, the only one "
        "that could, and not run whole on d-0 (500.00 ms)."
    )


def test_explain_shows_the_terms_of_each_place_in_milliseconds(
    gateway: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(gateway, RECORD)
    main(["explain", "abc", "--address", gateway.address])
    lines = said(capsys)
    at = lines.index("prefill: 2 considered, terms in ms (* chosen)")
    assert lines[at + 1 : at + 4] == [
        "WORKER KV CACHED IN TIERS STREAMS queue prefill TOTAL",
        "* p-1 exact 1,024 128 3 3.00 9.00 12.00",
        "p-0 exact 0 128 3 20.07 60.23 80.30",
    ]


def test_explain_sets_what_was_foreseen_against_what_came(
    gateway: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(gateway, RECORD)
    main(["explain", "abc", "--address", gateway.address])
    assert said(capsys)[-5:] == [
        "PREDICTED ACTUAL",
        "cached tokens 1,024 992 of 1,501 in the prompt",
        "TTFT 32.5 ms 35.1 ms 2,000.0 ms promised",
        "mean ITL - 4.1 ms 100.0 ms promised",
        "SLO chat: met",
    ]


def test_explain_tells_how_much_was_to_come_from_tiers_and_how_much_came(
    gateway: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(gateway, replace(RECORD, predicted_tier_tokens=1008, actual_tier_tokens=512))
    main(["explain", "abc", "--address", gateway.address])
    assert "from tiers 1,008 512 of them" in said(capsys)


def test_explain_says_where_the_costs_began(gateway: Any, capsys: pytest.CaptureFixture[str]) -> None:
    answer(gateway, replace(RECORD, rates="profile of 2026-01-02"))
    main(["explain", "abc", "--address", gateway.address])
    assert "costs began with: profile of 2026-01-02; measurements correct them" in capsys.readouterr().out


def test_a_request_in_flight_has_no_outcome_yet(gateway: Any, capsys: pytest.CaptureFixture[str]) -> None:
    live = replace(RECORD, outcome=None, actual_cached_tokens=None, actual_ttft_s=None, slo_met=None)
    answer(gateway, replace(live, actual_itl_s=None, omitted=1200))
    main(["explain", "abc", "--address", gateway.address])
    lines = said(capsys)
    assert "abc-12345678: in flight" in lines[0]
    assert "1,200 more places were considered; the best are shown" in lines
    assert lines[-1] == "SLO chat: still open"


def test_a_choice_that_was_not_the_best_is_said_so(gateway: Any, capsys: pytest.CaptureFixture[str]) -> None:
    score = PhaseRecord("whole", "score", (place("w-0", False, 0.9), place("w-1", True, 0.5)))
    answer(gateway, replace(RECORD, parts=(score,), prefill_worker=None))
    main(["explain", "abc", "--address", gateway.address])
    assert (
        said(capsys)[1]
        == "Run whole on w-1 (score 0.5), by the rule disaggregated_prefix, not w-0 (score 0.9)."
    )


def test_near_equals_are_called_so(gateway: Any, capsys: pytest.CaptureFixture[str]) -> None:
    near = PhaseRecord("whole", "s", (place("w-0", False, 0.010), place("w-1", True, 0.0105)))
    answer(gateway, replace(RECORD, parts=(near,), prefill_worker=None))
    main(["explain", "abc", "--address", gateway.address])
    assert said(capsys)[1] == "Run whole on w-1 (10.50 ms), about as good as w-0 (10.00 ms)."


def test_a_policy_without_terms_and_an_infinite_one_can_be_shown(
    gateway: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = [replace(place(f"w-{i}", i == 0, 0.0), terms={}) for i in range(2)]
    answer(gateway, replace(RECORD, parts=(PhaseRecord("whole", "", tuple(plain)),)))
    main(["explain", "abc", "--address", gateway.address])
    assert "Run whole on w-0, one of 2 that could." in said(capsys)
    body = asdict(replace(RECORD, parts=(PhaseRecord("whole", "s", (place("w", True, 1.0),)),)))
    body["parts"][0]["places"][0]["total"] = None
    gateway.answers["/decisions/abc"] = (200, {"request_id": "abc", "decisions": [body]})
    main(["explain", "abc", "--address", gateway.address])
    assert any(line.endswith(" ∞") for line in said(capsys))


def test_each_prompt_of_a_call_is_explained(gateway: Any, capsys: pytest.CaptureFixture[str]) -> None:
    answer(gateway, RECORD, replace(RECORD, request_id="abc-12345678-1"))
    main(["explain", "abc", "--address", gateway.address])
    headings = [line for line in said(capsys) if "policy cost" in line]
    assert [line.split(":")[0] for line in headings] == ["abc-12345678", "abc-12345678-1"]


def test_explain_in_json_is_what_the_gateway_said(gateway: Any, capsys: pytest.CaptureFixture[str]) -> None:
    answer(gateway, RECORD)
    assert main(["explain", "abc", "-o", "json", "--address", gateway.address]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(json.dumps(gateway.answers["/decisions/abc"][1]))


def test_an_unknown_id_ends_with_1_and_says_what_is_kept(
    gateway: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    message = "No decision is kept for 'a/b'. Kept are those in flight and the newest 4096 that ended"
    gateway.answers["/decisions/a%2Fb"] = (
        404, {"error": {"message": message, "code": "decision_not_found"}},
    )  # fmt: skip
    assert main(["explain", "a/b", "--address", gateway.address]) == 1
    assert capsys.readouterr().err == f"error: {message}\n"
    assert main(["explain", "a/b", "--address", gateway.address, "-o", "json"]) == 1
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "decision_not_found"


def test_a_gateway_without_decisions_is_no_unknown_id(
    gateway: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.answers["/decisions/abc"] = (404, {"error": {"message": "no path", "code": "not_found"}})
    assert main(["explain", "abc", "--address", gateway.address]) == 1
    assert "answered 404 to /decisions/abc: no path" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "missing"),
    [
        (("status",), "no workers at /status"),
        (("get", "workers"), "no workers at /status"),
        (("explain", "abc"), "no decisions at /decisions/abc"),
        (("trace", "abc"), "no decisions at /decisions/abc"),
        (("tail",), "no records at /recordings/"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_a_server_of_another_kind_is_named_as_that(
    gateway: Any, capsys: pytest.CaptureFixture[str], command: tuple[str, ...], missing: str
) -> None:
    gateway.answers |= {path: (200, {}) for path in ("/status", "/decisions/abc", "/recordings/")}
    assert main([*command, "--address", gateway.address]) == 1
    error = capsys.readouterr().err
    assert f"returned {missing}" in error
    assert "is it a Kvasir gateway?" in error


def test_the_api_key_comes_from_the_environment(
    gateway: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway.answers["/status"] = (200, {"workers": [WORKER]})
    monkeypatch.setenv("KVASIR_API_KEY", "secret")
    assert main(["get", "workers", "--address", gateway.address]) == 0
    assert gateway.keys == ["Bearer secret"]


def test_the_api_key_can_come_from_a_file(
    gateway: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gateway.answers["/status"] = (200, {"workers": [WORKER]})
    (tmp_path / "key").write_text("secret\n")
    monkeypatch.setenv("KVASIR_API_KEY_FILE", str(tmp_path / "key"))
    assert main(["get", "workers", "--address", gateway.address]) == 0
    assert gateway.keys == ["Bearer secret"]
    (tmp_path / "key").unlink()
    assert main(["get", "workers", "--address", gateway.address]) == 2
    assert "KVASIR_API_KEY_FILE" in capsys.readouterr().err


@pytest.mark.parametrize(("key", "words"), [(None, "asks for an API key"), ("old", "refuses the key")])
def test_a_gateway_that_wants_a_key_is_answered_with_the_variable_to_set(
    gateway: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    key: str | None,
    words: str,
) -> None:
    gateway.answers["/status"] = (401, {"error": {"message": "?", "code": "invalid_api_key"}})
    if key is not None:
        monkeypatch.setenv("KVASIR_API_KEY", key)
    assert main(["get", "workers", "--address", gateway.address]) == 1
    error = capsys.readouterr().err
    assert words in error
    assert "KVASIR_API_KEY" in error
    assert key is None or key not in error.replace("KVASIR_API_KEY", "")


@pytest.mark.parametrize("command", [["get", "workers"], ["explain", "abc"]])
def test_without_a_deployment_the_error_says_how_to_name_a_gateway(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command) == 1
    assert "nothing runs here; start with: kvasir up, or name a gateway: --address" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["get", "explain"])
def test_the_help_teaches_by_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert "examples:" in capsys.readouterr().out


def test_the_regret_of_a_decision_is_shown_with_what_would_have_been_better(
    gateway: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    judged = replace(
        RECORD,
        regret_s=0.0123,
        regret_causes={"index": 0.0023, "queue": 0.01},
        better=("prefill p-0", "decode d-1"),
        better_ttft_s=0.02,
    )
    answer(gateway, RECORD, replace(RECORD, regret_s=0.0), judged)
    assert main(["explain", "abc", "--address", gateway.address]) == 0
    assert [line for line in said(capsys) if line.startswith("regret")] == [
        "regret: none; with what is known now, no other place would have cost less",
        "regret: 12.3 ms of cost (queue 10.0 ms, index 2.3 ms); prefill p-0 and decode d-1 would have cost "
        "less, with the first token 20.0 ms after the decision",
    ]


def test_the_regret_of_all_decisions_is_shown_by_cause(
    gateway: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    causes = {"choice": 0.0, "index": 0.2, "queue": 0.6}
    models = {
        "tiny": {"judged": 1000, "regretted": 30, "seconds": 0.8, "causes": causes},
        "idle": {"judged": 0, "regretted": 0, "seconds": 0.0, "causes": causes},
    }
    gateway.answers["/decisions"] = (200, {"models": models})
    assert main(["explain", "--address", gateway.address]) == 0
    assert said(capsys) == [
        "tiny: another place would have cost less for 30 of 1,000 judged decisions (3.0%), by 0.800 ms per "
        "decision on average",
        "",
        "CAUSE MS PER DECISION SHARE",
        "queue 0.600 75% the engine was busy for longer than estimated",
        "index 0.200 25% the engine found fewer cached tokens than the index predicted",
        "",
        "idle: no decision was judged yet. Judged are those of the policy cost whose requests ended well "
        "where they were first placed",
    ]
    assert main(["explain", "--address", gateway.address, "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"models": models}
