"""`kvasir record`: whole and bounded files, routers that come and go, and errors that say what to do."""

from __future__ import annotations

import errno
import json
import os
import stat
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any

import pyarrow.parquet
import pytest

from kvasir.core.errors import ConfigError, UpstreamError
from kvasir_platform.cli.common.gateway_site import Site
from kvasir_platform.cli.main import main
from kvasir_platform.cli.record import files as files_module
from kvasir_platform.cli.record.files import HEADER_BYTES, FileLimits, RecordingFiles
from kvasir_platform.cli.record.run import LOST_S, RecordingOptions, RecordingRun, RecordingState
from kvasir_platform.workload.files import open_workload, read_workload

ROOMY = FileLimits(1000, 1 << 20)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVASIR_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("KVASIR_API_KEY", raising=False)


def row(arrival_s: float = 0.5, **fields: Any) -> dict[str, Any]:
    known = {"prompt_tokens": 130, "output_tokens": 8, "prefix_hashes": [7, 8], "model": "m", "slo": "s"}
    return {"arrival_s": arrival_s, **known, "outcome": {"code": "ok"}, **fields}


class Router:
    """A router's recording, as a test wants it."""

    def __init__(self) -> None:
        self.opened = "r/1"
        self.rows: list[dict[str, Any]] = []
        self.asked: list[dict[str, Any]] = []
        self.left = False
        self.dropped = self.running = 0
        self.elapsed_s = 0.0
        self.block_tokens = 64
        self.failing: UpstreamError | None = None

    def read(self, body: Mapping[str, Any]) -> dict[str, Any]:
        if body.get("done"):
            self.left = True
            return {}
        self.asked.append(dict(body))
        if self.failing is not None:
            raise self.failing
        left = self.rows[body["after"] :]
        page = left[:2]
        return {
            "opened": self.opened,
            "elapsed_s": self.elapsed_s,
            "records": page,
            "last": body["after"] + len(page) if left else min(body["after"], len(self.rows)),
            "dropped": self.dropped,
            "running": self.running,
            "more": len(left) > 2,
            "block_tokens": self.block_tokens,
        }


class Clockwork(threading.Event):
    """A stop that never waits: each wait is a second, and the next step of a script."""

    def __init__(self, steps: list[Callable[[], None]]) -> None:
        super().__init__()
        self.now = 0.0
        self.steps = steps

    def wait(self, timeout: float | None = None) -> bool:
        self.now += timeout or 0.0
        if self.steps:
            self.steps.pop(0)()
        else:
            self.set()
        return self.is_set()


def run(
    path: Path,
    *routers: Router,
    steps: list[Callable[[], None]] | None = None,
    limits: FileLimits = ROOMY,
    duration_s: float = 100.0,
    wait_s: float = 5.0,
) -> RecordingState:
    state = RecordingState()
    clock = Clockwork(steps or [])
    sites = {Site(f"router-{number}:8000"): router for number, router in enumerate(routers)}

    def header(requests: int, complete: bool) -> dict[str, Any]:
        return {"complete": complete, "requests": requests, "dropped": state.dropped, "gaps": state.gaps}

    files = RecordingFiles(path, limits, header)
    options = RecordingOptions("me", b"s" * 16, duration_s, wait_s)
    RecordingRun(
        options,
        list(sites),
        files,
        state,
        shown=lambda _: None,
        stop=clock,
        read=lambda site, _, body: sites[site].read(body),
        now=lambda: clock.now,
    ).run()
    return state


def lines(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    header, *rows = map(json.loads, path.read_text().splitlines())
    return header, rows


def test_what_routers_return_is_in_the_file_with_a_header_that_says_it_is_complete(tmp_path: Path) -> None:
    router, path = Router(), tmp_path / "a.jsonl"
    router.rows = [row(at / 10, tenant="tenant-1", decision={"mode": "whole"}) for at in range(5)]
    router.dropped = 3
    state = run(path, router)
    header, rows = lines(path)
    assert header["format"] == "kvasir-workload/1"
    assert (header["block_tokens"], header["complete"], header["requests"], header["dropped"]) == (
        64,
        True,
        5,
        3,
    )
    assert [each["arrival_s"] for each in rows] == [0.0, 0.1, 0.2, 0.3, 0.4]
    assert rows[0]["outcome"] == {"code": "ok"}
    assert rows[0]["decision"] == {"mode": "whole"}
    assert (state.requests, state.dropped, router.left) == (5, 3, True)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    workload = read_workload(path, Random(0))
    assert [each.tenant for each in workload.requests] == ["tenant-1"] * 5
    assert workload.requests[0].names[:2].tolist() == [7, 8]


def test_arrivals_at_two_routers_are_on_one_clock(tmp_path: Path) -> None:
    """The second one's recording began when the first one's was 0.25 s old, as far as its own clock says."""
    first, second = Router(), Router()
    first.rows = [row(0.5)]

    def begun() -> None:
        second.opened, second.elapsed_s, second.rows = "r/2", 0.75, [row(0.5)]

    run(tmp_path / "a.jsonl", first, second, steps=[begun])
    _, rows = lines(tmp_path / "a.jsonl")
    assert sorted(each["arrival_s"] for each in rows) == [0.5, 0.75]


def test_a_router_that_restarts_is_read_from_its_new_beginning(tmp_path: Path) -> None:
    router = Router()
    router.rows = [row(0.1), row(0.2)]

    def restart() -> None:
        router.failing = UpstreamError("the gateway at router-0:8000 does not answer")

    def back() -> None:
        router.failing, router.opened, router.rows = None, "other/1", []

    def serve() -> None:
        router.elapsed_s, router.rows = 1.0, [row(0.5)]

    state = run(tmp_path / "a.jsonl", router, steps=[lambda: None, restart, back, serve])
    header, rows = lines(tmp_path / "a.jsonl")
    assert (len(rows), header["gaps"], state.gaps) == (3, 1, 1)
    assert rows[2]["arrival_s"] == 3.5


def test_a_recording_ends_when_no_router_answers_any_more_and_keeps_the_file(tmp_path: Path) -> None:
    router = Router()
    router.rows = [row()]

    def gone() -> None:
        router.failing = UpstreamError("the gateway at router-0:8000 does not answer")

    steps: list[Callable[[], None]] = [lambda: None, gone, *[lambda: None] * 80]
    with pytest.raises(UpstreamError, match=f"no router has answered for {LOST_S:.0f} s"):
        run(tmp_path / "a.jsonl", router, steps=steps)
    header, rows = lines(tmp_path / "a.jsonl")
    assert (header["complete"], len(rows)) == (False, 1)


def test_a_router_that_cannot_be_recorded_ends_the_command_at_once(tmp_path: Path) -> None:
    router = Router()
    router.failing = UpstreamError("no")
    with pytest.raises(UpstreamError, match="no"):
        run(tmp_path / "a.jsonl", router)
    assert not (tmp_path / "a.jsonl").exists()


def test_what_still_runs_at_the_end_is_waited_for_and_then_counted(tmp_path: Path) -> None:
    router = Router()
    router.rows, router.running = [row()], 2
    state = run(tmp_path / "a.jsonl", router, steps=[lambda: None] * 200, duration_s=3.0, wait_s=4.0)
    assert state.unfinished == 2
    assert state.elapsed_s == pytest.approx(7.0, abs=1.1)
    assert [body["closing"] for body in router.asked[-4:]] == [True] * 4


def test_without_requests_there_is_a_file_with_a_header_alone(tmp_path: Path) -> None:
    run(tmp_path / "a.jsonl", Router())
    header, rows = lines(tmp_path / "a.jsonl")
    assert (header["complete"], rows) == (True, [])


def test_names_of_other_blocks_than_the_headers_are_left_out(tmp_path: Path) -> None:
    router = Router()
    router.rows = [row()]

    def other() -> None:
        router.block_tokens = 96
        router.rows.append(row())

    run(tmp_path / "a.jsonl", router, steps=[lambda: None, other])
    assert [each["prefix_hashes"] for each in lines(tmp_path / "a.jsonl")[1]] == [[7, 8], []]


@pytest.mark.parametrize("limits", [FileLimits(2, 1 << 20), FileLimits(1000, HEADER_BYTES + 200)])
def test_a_full_file_ends_the_recording(tmp_path: Path, limits: FileLimits) -> None:
    router = Router()
    router.rows = [row(at) for at in range(9)]
    run(tmp_path / "a.jsonl", router, limits=limits)
    assert len(lines(tmp_path / "a.jsonl")[1]) == 2


def test_of_full_files_the_newest_are_kept(tmp_path: Path) -> None:
    router = Router()
    router.rows = [row(float(at)) for at in range(9)]
    run(tmp_path / "a.jsonl", router, limits=FileLimits(2, 1 << 20, keep=3))
    kept = {path.name: lines(path) for path in tmp_path.glob("*.jsonl")}
    assert sorted(kept) == ["a.3.jsonl", "a.4.jsonl", "a.5.jsonl"]
    assert [len(rows) for _, rows in kept.values()].count(2) == 2
    assert all(header["complete"] for header, _ in kept.values())
    assert kept["a.5.jsonl"][1][0]["arrival_s"] == 8.0


def test_a_full_disk_keeps_what_is_whole_and_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = Router()
    router.rows = [row(float(at)) for at in range(9)]
    room = HEADER_BYTES + 400
    create = files_module._create

    class SmallDisk:
        """A file on a disk that is nearly full."""

        def __init__(self, file: Any) -> None:
            self.file = file

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

        def __enter__(self) -> Any:
            return self.file.__enter__()

        def __exit__(self, *error: object) -> Any:
            return self.file.__exit__(*error)

        def write(self, data: Any) -> int:
            left = room - self.file.tell()
            if left <= 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return int(self.file.write(bytes(data)[:left]))

    monkeypatch.setattr(files_module, "_create", lambda path: SmallDisk(create(path)))
    with pytest.raises(
        UpstreamError, match="no space is left; the 3 requests before that are in the file"
    ) as full:
        run(tmp_path / "a.jsonl", router)
    assert "free some, or limit the file with --bytes and --keep" in full.value.message
    header, rows = lines(tmp_path / "a.jsonl")
    assert (header["complete"], len(rows)) == (False, 3)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("there.jsonl", "exists; name another file"),
        ("none/a.jsonl", "does not exist; create it"),
        ("a.csv", r"ends in \.jsonl or \.parquet, or - for"),
    ],
)
def test_a_path_that_cannot_be_used_is_refused_before_anything_is_recorded(
    tmp_path: Path, name: str, message: str
) -> None:
    (tmp_path / "there.jsonl").touch()
    with pytest.raises(ConfigError, match=message):
        run(tmp_path / name, Router())


def test_parquet_without_its_library_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"install kvasir\[parquet\], or name a file that ends in \.jsonl"):
        run(tmp_path / "a.parquet", Router())


def test_parquet_holds_what_json_lines_do(tmp_path: Path) -> None:
    router = Router()
    router.rows = [row(at / 10, session="session-1", decision={"mode": "whole"}) for at in range(5)]
    for name in ("a.jsonl", "a.parquet"):
        run(tmp_path / name, router)
    assert (
        read_workload(tmp_path / "a.jsonl", Random(0)).requests
        == read_workload(tmp_path / "a.parquet", Random(0)).requests
    )
    assert not list(tmp_path.glob("*.parquet.jsonl"))


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: path.write_bytes(b"PAR1"), "no Parquet file"),
        (lambda path: pyarrow.parquet.write_table(pyarrow.table({"a": [1]}), path), "no recording"),
    ],
    ids=["bytes", "another table"],
)
def test_a_parquet_file_that_is_no_recording_is_refused(
    tmp_path: Path, write: Callable[[Path], object], message: str
) -> None:
    write(tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=rf"a\.parquet: {message}"):
        open_workload(str(tmp_path / "a.parquet"), Random(0))


# -- the command line ------------------------------------------------------------------------------


def page(**fields: Any) -> dict[str, Any]:
    empty = {"opened": "r/1", "elapsed_s": 0.0, "records": [], "last": 0, "dropped": 0, "running": 0}
    return empty | {"more": False, "block_tokens": 64} | fields


def record(gateway: Any, path: Path, *options: str) -> int:
    return main(["record", str(path), "--duration", "0.1", "--address", gateway.address, *options])


def test_the_command_tells_the_router_what_is_wanted_and_says_what_it_wrote(
    gateway: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.answers["/recordings/"] = lambda sent: (
        200,
        page(records=[row()] if sent.get("closing") else [], last=1),
    )
    path, salt = tmp_path / "a.jsonl", tmp_path / "salt"
    salt.write_bytes(b"0123456789abcdef")
    options = ("--salt-file", str(salt), "--clear-names", "--no-decisions", "--block-tokens", "32")
    assert record(gateway, path, *options) == 0
    sent = gateway.posts[0][1]
    assert (bytes.fromhex(sent["salt"]), sent["names"], sent["decisions"]) == (salt.read_bytes(), True, False)
    assert sent["block_tokens"] == 32
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == f"recording 1 router to {path}; Ctrl-C ends it"
    assert printed[1].startswith("recorded 1 requests in ")
    header, rows = lines(path)
    assert (header["names"], header["routers"], len(rows)) == ("clear", 1, 1)


def test_two_recordings_have_different_salts(gateway: Any, tmp_path: Path) -> None:
    gateway.answers["/recordings/"] = (200, page())
    for name in ("a", "b"):
        assert record(gateway, tmp_path / f"{name}.jsonl") == 0
    assert len({body["salt"] for _, body in gateway.posts}) == 2
    assert len({path for path, _ in gateway.posts}) == 2


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((401, {}), "asks for an API key; set KVASIR_API_KEY"),
        ((403, {"error": {"code": "operator_only", "message": "no"}}), "set it to an operator's key"),
        (
            (404, {"error": {"code": "not_found", "message": "no"}}),
            "it is older than this command; update it",
        ),
        ((503, {"error": {"message": "4 recordings are read from this router"}}), "4 recordings are read"),
    ],
    ids=["no key", "a tenant's key", "an old router", "too many readers"],
)
def test_a_router_that_refuses_is_explained(
    gateway: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], answer: Any, message: str
) -> None:
    gateway.answers["/recordings/"] = answer
    assert record(gateway, tmp_path / "a.jsonl") == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "a.jsonl").exists()


def test_without_a_deployment_the_command_says_how_to_name_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["record", str(tmp_path / "a.jsonl")]) == 1
    assert "nothing runs here; start with: kvasir up, or name a gateway" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--duration=0", "'0': a time up to seven days"),
        ("--duration=8x", "'8x': a time up to seven days"),
        ("--wait=8d", "'8d': a time up to seven days"),
        ("--bytes=1", "'1': name a size of at least 16K"),
        ("--requests=0", "'0': a whole number from 1"),
        ("--keep=0", "'0': a whole number from 1 to 1000"),
        ("--block-tokens=0", "'0': a whole number from 1 to 65536"),
    ],
)
def test_an_impossible_limit_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, message: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["record", str(tmp_path / "a.jsonl"), option])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_salt_that_can_be_guessed_is_refused(
    gateway: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    salt = tmp_path / "salt"
    salt.write_text("kvasir")
    assert record(gateway, tmp_path / "a.jsonl", "--salt-file", str(salt)) == 2
    assert "head -c 32 /dev/urandom" in capsys.readouterr().err


def test_a_service_is_looked_up_in_a_pod_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert main(["record", str(tmp_path / "a.jsonl"), "--service", "x-router"]) == 2
    assert "kubectl exec deploy/NAME-router -- kvasir record -" in capsys.readouterr().err
