"""Deployments and engines of tests are started once for each spec."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.kit.shared.deployments import StackRegistry
from tests.kit.shared.engines import EngineRegistry, WantedEngine, engines_of
from tests.kit.shared.specs import PLAIN, PLAIN_ENGINE, apart


@dataclass
class Log:
    """What was started and stopped, in order; `stacks` are those that were started."""

    said: list[str] = field(default_factory=list)
    stacks: list[Any] = field(default_factory=list)

    @contextlib.contextmanager
    def up(self, home: Path, flag: str, file: str, headers: object) -> Iterator[Any]:
        assert (flag, headers) == ("-f", None)
        spec = Path(file).read_text()
        self.said.append(f"start {spec}")
        self.stacks.append(SimpleNamespace(ended=False))
        yield self.stacks[-1]
        self.said.append(f"stop {spec}")


def test_a_deployment_is_started_once_for_its_spec_and_stopped_before_another(tmp_path: Path) -> None:
    log = Log()
    stacks = StackRegistry(log.up, lambda: tmp_path)
    first = stacks.running("a")
    assert stacks.running("a") is first
    assert stacks.running("b") is not first
    assert log.said == ["start a", "stop a", "start b"]
    stacks.stop()
    stacks.stop()
    assert log.said[3:] == ["stop b"]


def test_a_deployment_that_a_test_has_stopped_is_started_again(tmp_path: Path) -> None:
    log = Log()
    stacks = StackRegistry(log.up, lambda: tmp_path)
    first = stacks.running("a")
    log.stacks[0].ended = True
    assert stacks.running("a") is not first
    assert log.said == ["start a", "stop a", "start a"]


@dataclass
class Wanted:
    """An engine that is only written down."""

    key: str
    log: list[str]

    async def start(self) -> Any:
        async def stop() -> None:
            self.log.append(f"stop {self.key}")

        self.log.append(f"start {self.key}")
        return _Bench(stop)


class _Bench:
    def __init__(self, stop: Any) -> None:
        self.engine = SimpleNamespace(stop=stop)
        self.recorder = SimpleNamespace(violations=[])


async def test_an_engine_is_started_once_for_its_spec_and_stopped_when_others_are_wanted() -> None:
    log: list[str] = []
    a, b, c = (Wanted(key, log) for key in "abc")
    registry: Any = EngineRegistry()
    both = await registry.running(a, b)
    assert await registry.running(b, a) == [both[1], both[0]]
    await registry.running(a, c)
    assert log == ["start a", "start b", "stop b", "start c"]
    async with registry.alone(b):
        assert log[4:] == ["start b"]
    await registry.stop()
    assert log[5:] == ["stop b", "stop a", "stop c"]


def test_engines_are_equal_when_nothing_of_their_own_spec_differs() -> None:
    prefill, decode = engines_of(PLAIN)
    speaking = apart(PLAIN_ENGINE, PLAIN_ENGINE.model_copy(update={"max_num_seqs": 8}), overlap="always")
    other_prefill, other_decode = engines_of(speaking)
    assert other_prefill.key == prefill.key
    assert other_decode.key != decode.key
    assert engines_of(apart(PLAIN_ENGINE, kind="nccl"))[0].key != prefill.key
    assert WantedEngine(PLAIN, "prefill", "prefill-0", variant="zeroing").key != prefill.key
