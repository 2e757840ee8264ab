"""Fast-path streams: the machine's state of them afterwards, and what is dropped."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.kit.lanes import socket_lane, stream_gaps

from kvasir.core.kv import KvBatch
from kvasir.core.messages import EncodedStep, WorkerFrame
from kvasir.core.requests import (
    Continuation,
    Delta,
    EngineLoad,
    FinishReason,
    Request,
    Role,
    Sampling,
    StepBatch,
    Usage,
    token_ids,
)
from kvasir.native import IS_NATIVE, Lane, StreamTokens
from kvasir.ports.router import RequestSummary
from kvasir.telemetry.families.updated import Histogram
from kvasir.wire.codec import decode_to_router, encode_to_router
from kvasir_router.fast_path import LOAD_S, FastPath
from kvasir_router.requests.events import (
    Effect,
    EmitDelta,
    FinishRequest,
    RequestArrived,
    RequestCancelled,
    SubmitTo,
    TimerTick,
    WorkerInterrupted,
    WorkerLost,
)

from .requests.test_machine import MakeIdentity, Stage, has, only

pytestmark = pytest.mark.skipif(not IS_NATIVE, reason="the twin opens no lane")


@dataclass
class Client:
    """A sink whose stream has a lane, and who reads it."""

    deltas: list[Delta] = field(default_factory=list)
    ends: tuple[socket.socket, socket.socket] = field(default_factory=socket.socketpair)
    gaps: Histogram = field(default_factory=lambda: Histogram((1.0,)))
    lanes: list[Lane] = field(default_factory=list)

    def on_delta(self, delta: Delta) -> None:
        self.deltas.append(delta)

    def on_finish(self, summary: RequestSummary) -> None:
        raise AssertionError("the shell's affair")

    def on_error(self, error: Exception, summary: RequestSummary) -> None:
        raise AssertionError("the shell's affair")

    def lane(self, request_id: str) -> Lane:
        lane = socket_lane(self.ends[0].fileno(), stream_gaps(self.gaps), write=lambda data: None)
        self.lanes.append(lane)
        return lane

    def read(self) -> str:
        self.ends[1].setblocking(False)
        try:
            return self.ends[1].recv(1 << 16).decode()
        except BlockingIOError:
            return ""


class Scene:
    """A machine with two workers, and the fast path past it, performed as the router's shell does."""

    def __init__(self, make_identity: MakeIdentity, client: Client | None = None, fast: bool = True) -> None:
        self.stage = Stage(make_identity, "never")
        self.stage.ready(b0=Role.BOTH, b1=Role.BOTH)
        fast_path_of = self.stage.machine.fast_path_of
        self.fast_path = FastPath(lambda request_id, _: fast_path_of(request_id))
        self.client = client or Client()
        self.fast = fast

    def begin(self, sampling: Sampling | None = None) -> str:
        """A stream of which the client has two tokens; returns where it runs."""
        request = Request("r", "m", token_ids(range(20)), sampling or Sampling(temperature=0.0, max_tokens=9))
        worker = only(self.stage.tell(RequestArrived(request)), SubmitTo).worker_id
        self.say(worker, Delta("r", 0, (7, 8), "ab"))
        return worker

    @property
    def progress(self) -> StreamTokens:
        """What the machine holds of the stream's only choice."""
        place = self.stage.machine.fast_path_of("r")
        assert place is not None
        return place[2]

    def say(self, worker: str, *deltas: Delta) -> list[Effect]:
        """A step of `worker`, as it comes over the wire; returns what the machine made of the rest of it."""
        frame = decode_to_router(encode_to_router(WorkerFrame(1, 0, StepBatch(deltas))))
        assert isinstance(frame, WorkerFrame)
        assert isinstance(frame.payload, EncodedStep)
        step = frame.payload
        rest = self.fast_path.rest(worker, step, 1.0) if self.fast else step.decode(None)
        effects = [] if rest is None else self.stage.say(worker, *rest.deltas)
        for effect in effects:
            if isinstance(effect, EmitDelta):
                self.client.on_delta(effect.delta)
                if self.fast:
                    self.fast_path.offer(effect.request_id, effect.delta, self.client)
        return effects


@pytest.fixture
def scene(make_identity: MakeIdentity) -> Iterator[Scene]:
    made = Scene(make_identity)
    yield made
    for end in made.client.ends:
        end.close()


def test_after_its_first_delta_a_stream_goes_past_the_machine_until_it_ends(scene: Scene) -> None:
    worker = scene.begin()
    assert not scene.say(worker, Delta("r", 2, (9,), "c"))
    assert not scene.say(worker, Delta("r", 3, (10,), "d"))
    assert scene.client.read() == '"c""d"'
    end = Delta("r", 4, (11,), "e", finish=FinishReason.STOP, last=True, usage=Usage(20, 0, 0, 0, 5))
    effects = scene.say(worker, end)
    assert only(effects, EmitDelta).delta.text == "e"
    assert only(effects, FinishRequest).summary.usage.output_tokens == 5
    assert len(scene.fast_path) == 0


def test_a_stream_that_moves_takes_along_what_went_past_the_machine(scene: Scene) -> None:
    worker = scene.begin()
    scene.say(worker, Delta("r", 2, (9,), "cé"))
    leg = only(scene.stage.tell(WorkerLost(worker, "gone")), SubmitTo)
    assert list(leg.request.tokens) == [*range(20), 7, 8, 9]
    assert leg.request.continuation == Continuation(output_tokens=3, text_length=4)
    assert not scene.say(worker, Delta("r", 3, (4,), "late"))
    assert scene.client.read() == '"cé"', "nothing of the lost worker comes after it"
    scene.say(leg.worker_id, Delta(leg.request.request_id, 3, (10,), "d"))
    assert [delta.text for delta in scene.client.deltas] == ["ab", "d"]
    scene.say(leg.worker_id, Delta(leg.request.request_id, 4, (11,), "e"))
    assert scene.client.read() == '"e"'


def test_a_worker_that_was_given_up_says_nothing_more_to_the_client(scene: Scene) -> None:
    worker = scene.begin()
    scene.stage.tell(WorkerInterrupted(worker))
    scene.stage.now = 5.0
    assert has(scene.stage.tell(TimerTick()), SubmitTo), "it goes on elsewhere"
    assert not scene.say(worker, Delta("r", 2, (9,), "late"))
    assert scene.client.read() == ""


def test_after_a_cancel_nothing_reaches_the_client(scene: Scene) -> None:
    worker = scene.begin()
    scene.stage.tell(RequestCancelled("r"))
    assert not scene.say(worker, Delta("r", 2, (9,), "late"))
    assert (scene.client.read(), len(scene.fast_path)) == ("", 0)


def test_a_token_that_is_lost_or_repeated_on_the_straight_way_is_a_fault_as_elsewhere(scene: Scene) -> None:
    worker = scene.begin()
    scene.say(worker, Delta("r", 2, (9,), "c"))
    effects = scene.say(worker, Delta("r", 2, (9,), "c"))
    assert scene.client.read() == '"c"'
    assert "token 3, and token 2 came" in str(effects)


def test_the_progress_of_a_stream_is_read_without_closing_its_lane(scene: Scene) -> None:
    worker = scene.begin()
    progress = scene.progress
    for at, text in enumerate("cdé", 2):
        assert not scene.say(worker, Delta("r", at, (at + 7,), text))
        assert (progress.count, progress.characters) == (at + 1, at + 1)
        assert list(progress.tokens) == [7, 8, *range(9, at + 8)]
        assert len(scene.fast_path) == 1
    assert len(scene.client.lanes) == 1


class Writing(Client):
    """A client to which the ordinary path writes what a lane does."""

    def on_delta(self, delta: Delta) -> None:
        super().on_delta(delta)
        if delta.text:
            self.ends[0].sendall(msgspec.json.encode(delta.text))


pieces = st.tuples(st.lists(st.integers(0, 99), max_size=3), st.text(max_size=3), st.booleans())


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(st.lists(st.lists(pieces, max_size=3), max_size=6))
def test_the_fast_path_changes_neither_progress_nor_bytes(
    make_identity: MakeIdentity, steps: list[list[tuple[list[int], str, bool]]]
) -> None:
    seen = []
    for fast in (True, False):
        client = Writing()
        try:
            scene = Scene(make_identity, client, fast)
            worker, at = scene.begin(Sampling(temperature=0.0, max_tokens=99)), 2
            progress = scene.progress
            reads: list[object] = [client.read()]
            for step in steps:
                deltas = []
                for ids, text, plain in step:
                    usage = None if plain else Usage(20, 0, 0, 0, at)
                    deltas.append(Delta("r", at, tuple(ids), text, usage=usage))
                    at += len(ids)
                scene.say(worker, *deltas)
                reads.append(client.read())
                reads.append((progress.count, progress.characters, list(progress.tokens)))
            end = Delta("r", at, (), "", finish=FinishReason.STOP, last=True, usage=Usage(20, 0, 0, 0, at))
            summary = only(scene.say(worker, end), FinishRequest).summary
            seen.append((reads, summary.usage, len(scene.fast_path)))
        finally:
            for side in client.ends:
                side.close()
    assert seen[0] == seen[1]


def test_a_request_with_several_choices_takes_the_ordinary_way(scene: Scene) -> None:
    worker = scene.begin(Sampling(n=2))
    assert len(scene.fast_path) == 0
    assert only(scene.say(worker, Delta("r", 2, (9,), "c")), EmitDelta).delta.text == "c"
    assert scene.client.read() == ""


def test_a_stream_that_is_made_anew_from_its_beginning_takes_the_ordinary_way(scene: Scene) -> None:
    worker = scene.begin(Sampling(temperature=1.0, seed=3, max_tokens=9))
    leg = only(scene.stage.tell(WorkerLost(worker, "gone")), SubmitTo)
    scene.say(leg.worker_id, Delta(leg.request.request_id, 0, (7, 8, 9), "abc"))
    assert scene.client.deltas[-1].text == "c"
    assert len(scene.fast_path) == 0


def test_of_loads_that_come_alone_one_is_looked_at_every_while(scene: Scene) -> None:
    worker = scene.begin()

    def said_at(now: float, step: StepBatch) -> StepBatch | None:
        frame = decode_to_router(encode_to_router(WorkerFrame(1, 0, step)))
        assert isinstance(frame, WorkerFrame)
        assert isinstance(frame.payload, EncodedStep)
        return scene.fast_path.rest(worker, frame.payload, now)

    load = EngineLoad(running=1)
    first = StepBatch((Delta("r", 2, (9,), "c"),), load)
    assert said_at(1.0, first) == StepBatch((), load)
    assert said_at(1.0 + LOAD_S / 2, StepBatch((Delta("r", 3, (10,), "d"),), load)) is None
    changed = StepBatch((), load, KvBatch(1, 1, b""))
    assert said_at(1.0 + LOAD_S / 2, changed) == changed
    assert said_at(1.0 + 2 * LOAD_S, StepBatch((), load)) == StepBatch((), load)
