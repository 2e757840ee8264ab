"""Pulls from a sender of the same machine, whose blocks and leases the kernel reads."""

from __future__ import annotations

import numpy as np
import pytest
from tests.kit.engines.pull_bench import Bench, ScriptedKernel, reasons, sums_of

from kvasir.ports.transfer import PullFailed
from kvasir_workers.transfer.nixl.agent import XferState


@pytest.fixture
def kernel() -> ScriptedKernel:
    return ScriptedKernel()


@pytest.mark.parametrize(("changed", "how"), [(0, "pulled"), (1, "checksum")])
def test_the_sums_of_the_read_are_compared(kernel: ScriptedKernel, changed: int, how: str) -> None:
    bench = Bench(parts=2, kernel=kernel)
    sums = sums_of([20, 21], range(2))
    sums[1, 1] += np.uint64(changed)
    bench.page("a", total=2).add([0, 1], sums)
    bench.side.pull("a", bench.offer("a", known_blocks=2, total=2), 0, [20, 21], 5.0)
    assert bench.side.poll() == []
    (read,) = kernel.reads
    read.ended = XferState.DONE
    (ended,) = bench.side.poll()
    assert reasons([ended]) == {"a": how}
    assert (bench.network.notices == ["peer"]) is (how == "pulled")
    assert bench.network.reads == []
    if isinstance(ended, PullFailed):
        assert "block 21, from block 1 of agent peer" in ended.detail


def test_a_lease_that_ended_meanwhile_is_not_pulled(kernel: ScriptedKernel) -> None:
    bench = Bench(kernel=kernel)
    bench.pull("a")
    bench.side.poll()
    bench.network.table.end("a")
    kernel.reads[0].ended = XferState.DONE
    assert reasons(bench.side.poll()) == {"a": "expired"}


def test_a_read_that_breaks_off_fails_the_pull_when_no_other_writes_for_it(kernel: ScriptedKernel) -> None:
    bench = Bench(kernel=kernel)
    bench.pull("a", blocks=16)
    bench.side.poll()
    first, second = kernel.reads
    first.ended = XferState.FAILED
    assert bench.side.poll() == []
    assert second.cancelled
    second.ended = XferState.FAILED
    assert reasons(bench.side.poll()) == {"a": "io"}


def test_a_late_pull_is_cancelled_and_the_agent_stays(kernel: ScriptedKernel) -> None:
    bench = Bench(kernel=kernel)
    bench.pull("late")
    bench.side.poll()
    bench.now = 5.0
    assert bench.side.poll() == []
    assert kernel.reads[0].cancelled
    kernel.reads[0].ended = XferState.FAILED
    assert reasons(bench.side.poll()) == {"late": "timeout"}
    assert [agent.closed for agent in bench.network.agents] == [False]


def test_a_cancelled_read_does_not_disturb_another_pull_from_the_same_sender(kernel: ScriptedKernel) -> None:
    bench = Bench(kernel=kernel)
    bench.pull("late")
    bench.now = 1.0
    bench.pull("b")
    late, other = kernel.reads
    bench.now = 5.5
    assert bench.side.poll() == []
    assert late.cancelled
    late.ended = XferState.FAILED
    assert reasons(bench.side.poll()) == {"late": "timeout"}
    bench.pull("c")
    other.ended = kernel.reads[2].ended = XferState.DONE
    assert reasons(bench.side.poll()) == {"b": "pulled", "c": "pulled"}


def test_a_sender_that_died_before_the_last_look_fails_the_pull(kernel: ScriptedKernel) -> None:
    bench = Bench(kernel=kernel)
    bench.pull("a")
    bench.side.poll()
    kernel.reads[0].ended = XferState.DONE
    kernel.gone = True
    assert reasons(bench.side.poll()) == {"a": "io"}


def test_a_sender_that_the_kernel_does_not_let_us_read_is_read_by_the_agent(kernel: ScriptedKernel) -> None:
    kernel.refuses = True
    bench = Bench(kernel=kernel)
    bench.pull("a")
    bench.arrive()
    assert reasons(bench.side.poll()) == {"a": "pulled"}
    assert kernel.reads == []


def test_closing_ends_what_the_kernel_reads(kernel: ScriptedKernel) -> None:
    bench = Bench(kernel=kernel)
    bench.pull("a")
    assert reasons(bench.side.close()) == {"a": "closed"}
    assert kernel.closed
