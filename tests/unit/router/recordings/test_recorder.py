"""What is kept for readers of a recording: within bounds, without content, and nothing without a reader."""

from __future__ import annotations

import json
from array import array
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvasir.core.errors import CapacityError
from kvasir.core.requests import Request, Sampling, SloClass, Task, Usage, token_ids
from kvasir.ports.recordings import RecordingBatch, RecordingQuery
from kvasir.ports.router import RequestSummary
from kvasir_router.fleet.work import PromptBlocks
from kvasir_router.recordings import recorder
from kvasir_router.recordings.recorder import BATCH_RECORDS, FORGOTTEN_S, MOST_READERS, Recordings

SALT = b"s" * 16


@dataclass
class Desk:
    """A router's recordings under a clock that the test moves."""

    now: float = 100.0
    blocks: int = 8
    recordings: Recordings = field(init=False)

    def __post_init__(self) -> None:
        self.recordings = Recordings("router-1", "cost", lambda: self.now)

    def read(self, reader: str = "me", **query: Any) -> RecordingBatch:
        return self.recordings.read(reader, RecordingQuery(**({"salt": SALT} | query)))

    def blocks_of(self, request: Request) -> PromptBlocks:
        return PromptBlocks(array("Q", range(self.blocks)), 16, 77)

    def request(self, name: str = "r", **fields: Any) -> Request:
        tokens = token_ids([1234567] * (16 * self.blocks + 3))
        return Request(name, "m", tokens, arrival_s=self.now, **fields)

    def arrive(self, name: str = "r", **fields: Any) -> Request:
        request = self.request(name, **fields)
        if self.recordings.active:
            self.recordings.arrived(request)
        return request

    def end(self, request: Request, outcome: str = "ok", **fields: Any) -> None:
        summary = RequestSummary(
            request.request_id,
            request.model,
            outcome,
            arrival_s=request.arrival_s,
            finished_s=self.now,
            routed_s=request.arrival_s,
            first_token_s=self.now - 0.5,
            usage=Usage(len(request.tokens), 32, output_tokens=11),
            **fields,
        )
        if self.recordings.active:
            self.recordings.ended(summary, None, self.blocks_of)

    def serve(self, name: str = "r", **fields: Any) -> None:
        self.end(self.arrive(name, **fields))


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_nothing_is_kept_before_a_reader_asks_or_after_it_has_stopped(desk: Desk) -> None:
    desk.serve("before")
    assert not desk.recordings.active
    assert desk.read().records == ()
    assert desk.recordings.active
    desk.now += FORGOTTEN_S + 1
    desk.serve("late")
    assert not desk.recordings.active
    again = desk.read()
    assert (again.records, again.opened) == ((), "router-1/2")


def test_a_record_has_what_a_replay_needs_and_how_it_went(desk: Desk) -> None:
    desk.read()
    desk.now += 2.5
    request = desk.arrive(tenant="acme", session="tab", slo=SloClass("chat", 1.0, 0.05))
    desk.now += 1.0
    desk.end(request, finish="stop", slo=request.slo, waited_s=0.1)
    (row,) = desk.read(block_tokens=16).records
    assert row["arrival_s"] == 2.5
    assert (row["prompt_tokens"], row["output_tokens"]) == (131, 11)
    assert (row["model"], row["slo"]) == ("m", "chat")
    assert len(set(row["prefix_hashes"])) == 8
    outcome = row["outcome"]
    assert (outcome["code"], outcome["status"], outcome["finish"]) == ("ok", 200, "stop")
    assert (outcome["ttft_s"], outcome["itl_s"], outcome["e2e_s"]) == (0.5, 0.05, 1.0)
    assert (outcome["cached_tokens"], outcome["waited_s"]) == (32, 0.1)


def test_no_content_and_no_name_of_a_tenant_is_in_it(desk: Desk) -> None:
    desk.read()
    desk.serve(tenant="acme-corp", session="alice@acme", salt="secret-salt")
    (row,) = desk.read().records
    text = json.dumps(row)
    for secret in ("acme", "alice", "1234567", "secret-salt"):
        assert secret not in text
    assert not set(range(8)) & set(row["prefix_hashes"])
    (named,) = desk.read(names=True).records
    assert (named["tenant"], named["session"]) == ("acme-corp", "alice@acme")


def test_names_of_larger_blocks_are_those_of_their_last_part(desk: Desk) -> None:
    desk.read()
    desk.serve()
    fine, coarse = (desk.read(block_tokens=tokens).records[0]["prefix_hashes"] for tokens in (16, 64))
    assert coarse == fine[3::4]
    batch = desk.read(block_tokens=24)
    assert batch.block_tokens == 48
    assert batch.records[0]["prefix_hashes"] == fine[2::3]


def test_a_record_is_returned_until_it_is_confirmed(desk: Desk) -> None:
    desk.read()
    for name in "ab":
        desk.serve(name)
    first = desk.read()
    assert (len(first.records), first.last) == (2, 2)
    assert desk.read() == first
    assert desk.read(after=1).records == first.records[1:]
    assert desk.read(after=2).records == ()
    desk.serve("c")
    assert desk.read(after=2).last == 3


def test_answers_are_bounded(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.read()
    for number in range(BATCH_RECORDS + 5):
        desk.serve(str(number))
    batch = desk.read()
    assert (len(batch.records), batch.more) == (BATCH_RECORDS, True)
    rest = desk.read(after=batch.last)
    assert (len(rest.records), rest.more) == (5, False)
    monkeypatch.setattr(recorder, "BATCH_BLOCKS", 20)
    for number in range(3):
        desk.serve(str(number))
    assert len(desk.read(after=rest.last).records) == 2


@pytest.mark.parametrize("bound", ["MOST_RECORDS", "MOST_BLOCKS"])
def test_what_does_not_fit_is_dropped_and_counted(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    monkeypatch.setattr(recorder, bound, 3 if bound == "MOST_RECORDS" else 3 * desk.blocks)
    desk.read()
    for number in range(5):
        desk.serve(str(number))
    batch = desk.read()
    assert (len(batch.records), batch.dropped) == (3, 2)
    desk.serve("more")
    assert len(desk.read(after=batch.last).records) == 0
    desk.serve("after it has read")
    assert len(desk.read(after=batch.last).records) == 1


def test_each_reader_has_its_own_place_and_no_more_than_a_few_may_read(desk: Desk) -> None:
    desk.read("one")
    desk.serve("a")
    desk.now += 1.0
    desk.read("two")
    desk.serve("b")
    assert len(desk.read("one").records) == 2
    (row,) = desk.read("two").records
    assert row["arrival_s"] == 0.0
    for number in range(MOST_READERS - 2):
        desk.read(f"more-{number}")
    with pytest.raises(CapacityError, match="4 recordings are read") as refused:
        desk.read("one too many")
    assert refused.value.code == "too_many_recordings"
    desk.now += FORGOTTEN_S + 1
    desk.read("one too many")


def test_a_reader_that_is_done_is_forgotten_at_once(desk: Desk) -> None:
    desk.read()
    desk.serve()
    assert desk.read(done=True).records == ()
    assert not desk.recordings.active


def test_a_closing_reader_waits_for_what_has_arrived_and_takes_nothing_new(desk: Desk) -> None:
    desk.read()
    early = desk.arrive("early")
    desk.now += 1.0
    assert desk.read(closing=True).running == 1
    desk.now += 1.0
    desk.serve("late")
    desk.end(early)
    batch = desk.read(closing=True)
    assert (len(batch.records), batch.running) == (1, 0)


def test_what_was_refused_on_arrival_is_recorded_with_the_output_that_was_expected(desk: Desk) -> None:
    desk.read()
    desk.recordings.refused(desk.request(), "queue_full", desk.blocks_of)
    (row,) = desk.read().records
    assert (row["outcome"]["code"], row["outcome"]["status"]) == ("queue_full", 503)
    assert (row["output_tokens"], row["outcome"]["output_tokens"]) == (77, 0)
    assert row["outcome"]["ttft_s"] is None


def test_an_embedding_has_no_output(desk: Desk) -> None:
    desk.read()
    desk.serve(task=Task.EMBED, sampling=Sampling(max_tokens=1))
    (row,) = desk.read().records
    assert (row["output_tokens"], row["embeds"]) == (0, True)


def test_a_request_that_came_before_the_reader_is_not_recorded(desk: Desk) -> None:
    desk.read("other")
    old = desk.arrive("old")
    desk.now += 1.0
    desk.read()
    desk.end(old)
    assert desk.read().records == ()
    assert len(desk.read("other").records) == 1


def test_a_reader_may_ask_for_ids_and_leave_out_the_names_of_blocks(desk: Desk) -> None:
    desk.read()
    desk.serve("r-7")
    (plain,) = desk.read().records
    assert "request_id" not in plain
    (row,) = desk.read(ids=True, prefixes=False).records
    assert row["request_id"] == "r-7"
    assert "prefix_hashes" not in row
