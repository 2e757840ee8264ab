"""Instructions are read from what valgrind writes, and compared per request."""

from __future__ import annotations

from pathlib import Path

import pytest
from load_tests.scenarios.gateway.processes import ProcessError
from load_tests.scenarios.instructions import run
from load_tests.scenarios.instructions.run import Counter, Pass, rows_of, tools, total
from load_tests.suite.catalog import SCENARIOS


def counted(*, off: int, observed: int, control: int) -> dict[str, dict[str, list[Pass]]]:
    sizes = ("100 B", "16 KiB", "128 KiB", "128 KiB, warm")
    return {
        "up": {size: [Pass(100, 400_000_000)] for size in sizes},
        "off": {"100 B": [Pass(100, off)]},
        "observed": {"100 B": [Pass(100, observed)]},
        "control": {"100 B": [Pass(100, control)]},
    }


def test_a_dump_has_one_sum() -> None:
    assert total("version: 1\nevents: Ir\nfn=(1) a\n12 7\n\ntotals: 1301\n") == 1301


def test_a_dump_without_a_sum_is_an_error() -> None:
    with pytest.raises(ProcessError, match="no sum"):
        total("version: 1\n")


def test_observing_is_compared_with_the_mean_of_both_routers_without_it() -> None:
    rows = {
        row.name: row for row in rows_of(counted(off=300_000_000, observed=320_000_000, control=340_000_000))
    }
    observed = rows["observability, 100 B, default"]
    assert (observed.value, observed.peer, observed.ratio, observed.met) == (3.2, 3.2, 1.0, True)
    assert rows["observability, 100 B, control"].ratio == pytest.approx(340 / 300)
    assert rows["observability, 100 B, control"].met is None


def test_observing_that_takes_more_than_a_twentieth_misses() -> None:
    rows = {
        row.name: row for row in rows_of(counted(off=300_000_000, observed=316_000_000, control=300_000_000))
    }
    assert rows["observability, 100 B, default"].met is False


def test_requests_of_passes_are_weighed_by_their_number() -> None:
    made = counted(off=1, observed=1, control=1)
    made["up"]["100 B"] = [Pass(300, 300_000_000), Pass(100, 500_000_000)]
    row = rows_of(made)[0]
    assert (row.name, row.value, row.spread) == ("request, 100 B", 2.0, (1.0, 5.0))


def test_the_rows_are_those_that_are_declared() -> None:
    rows = rows_of(counted(off=1, observed=1, control=1))
    assert tuple(row.name for row in rows) == SCENARIOS["instructions"].rows


def test_a_machine_without_the_tools_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(run, "_LIBRARIES", ("/nowhere/*.so",))
    with pytest.raises(ProcessError, match="apt-get install valgrind faketime"):
        tools()


def test_the_slow_clock_is_found_where_debian_puts_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    library = tmp_path / "x86_64-linux-gnu" / "faketime" / "libfaketimeMT.so.1"
    library.parent.mkdir(parents=True)
    library.touch()
    for name in ("valgrind", "callgrind_control"):
        (tmp_path / name).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(run, "_LIBRARIES", (f"{tmp_path}/*/faketime/libfaketimeMT.so.1",))
    assert tools().slow_clock == library


def control(folder: Path, script: str) -> str:
    """A program in place of callgrind_control, which knows the folder of counts as $counts."""
    made = folder / "control"
    made.write_text(f"#!/bin/sh\ncounts={folder}/counts\n{script}\n")
    made.chmod(0o755)
    (folder / "counts").mkdir()
    return str(made)


def test_instructions_are_those_since_they_were_read_last(tmp_path: Path) -> None:
    dump = 'test "$1" != -d || { number=$(($(cat $counts/../n) + 1)); echo $number > $counts/../n; '
    dump += 'echo "totals: $((number * 100))" > $counts/up.$number; }'
    (tmp_path / "n").write_text("0")
    counter = Counter(control(tmp_path, dump), 1, tmp_path / "counts", "up")
    assert [counter.read(), counter.read()] == [200, 300]


def test_a_count_that_valgrind_does_not_write_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ProcessError, match="up: valgrind wrote no counts"):
        Counter(control(tmp_path, "exit 0"), 1, tmp_path / "counts", "up")


def test_a_process_that_valgrind_does_not_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ProcessError, match="no such process"):
        Counter(control(tmp_path, "echo no such process; exit 1"), 1, tmp_path / "counts", "up")
