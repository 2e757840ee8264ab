"""`kvasir status` begins with whether all is well, and its exit status says so too."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.unit.cli.conftest import CannedGateway

from kvasir_platform.cli.commands.status.local_problems import ControlFacts, judged
from kvasir_platform.cli.commands.status.report import control_facts
from kvasir_platform.cli.main import main
from kvasir_platform.cluster.local.commands import listening, socket_path
from kvasir_platform.cluster.local.launcher import ReplicaStatus
from kvasir_platform.cluster.local.runtime_dir import DeploymentState
from kvasir_platform.gateway.openai.schema.operation import StatusVerdict


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVASIR_HOME", str(tmp_path))


WELL: dict[str, Any] = {
    "deployment": "kvasir",
    "workers": [{"worker_id": "decode-1", "pool": "decode", "state": "ready", "in_flight": 1}],
    "in_flight": 1,
    "verdict": {"ok": True, "sentence": "All is well: 1 worker serves 1 model.", "problems": []},
}


def problem(severity: str, code: str, subject: str = "decode") -> dict[str, str]:
    text, remedy = f"{code} of {subject}", f"mend {subject}"
    return {"severity": severity, "code": code, "subject": subject, "text": text, "remedy": remedy}


def page(*problems: dict[str, str]) -> dict[str, Any]:
    return WELL | {"verdict": {"ok": not problems, "sentence": "?", "problems": list(problems)}}


def state(**fields: Any) -> DeploymentState:
    known: dict[str, Any] = {
        "name": "kvasir", "deployment_id": "d", "pid": 1, "phase": "ready", "started_at": 0.0, "model": "m",
        "spec": "", "logs": "/logs", "temp_dir": "", "stop_s": 1.0, "address": "127.0.0.1:8000",
    }  # fmt: skip
    return DeploymentState(**(known | fields))


def ready(pool: str = "decode") -> ReplicaStatus:
    return ReplicaStatus(pool, f"{pool}-0", "ready")


def judge(
    found: dict[str, Any] | None, running: bool = True, trouble: str = "", **fields: Any
) -> StatusVerdict:
    return judged(state(**fields), found, trouble, running=running)


def test_what_the_gateway_says_is_said() -> None:
    assert judge(WELL) == StatusVerdict(True, "All is well: 1 worker serves 1 model.", [])
    found = judge(page(problem("warning", "worker_draining"), problem("degraded", "brownout")))
    assert found.sentence == "Service is degraded: brownout of decode. Mend decode. (1 more below.)"


@pytest.mark.parametrize(
    ("verdict", "text"),
    [
        (judge(None, running=False), "Requests fail: the supervisor of kvasir was killed"),
        (judge(None, phase="starting", address=""), "Requests fail: kvasir has no gateway yet: it is"),
        (judge(None, trouble="the gateway does not answer"), "Requests fail: the gateway does not answer."),
    ],
    ids=["killed", "starting", "no answer"],
)
def test_what_only_this_machine_knows_is_said(verdict: StatusVerdict, text: str) -> None:
    assert verdict.sentence.startswith(text)
    assert verdict.problems[0].severity == "down"


def test_a_replica_that_does_not_start_is_a_problem_with_its_remedy() -> None:
    failed = ReplicaStatus("decode", "decode-1", "failed", "no GPU is free", remedy="lower replicas")
    found = judge(page(), replicas=(ready(), failed))
    assert found.sentence == (
        "Service is degraded: replica decode-1 did not start: no GPU is free. Lower replicas."
    )


def test_a_pool_that_was_made_smaller_is_no_problem_until_it_lacks_a_worker() -> None:
    short = page(problem("warning", "pool_short")) | {"pools": [{"pool": "decode", "serving": 1}]}
    assert judged(state(), short, "", running=True, control=ControlFacts("", {"decode": 1})).ok
    for sizes in ({"decode": 2}, {}):
        found = judged(state(replicas=(ready(),)), short, "", running=True, control=ControlFacts("", sizes))
        assert found.sentence.startswith("Requests are served, but pool_short")


def test_planner_that_keeps_sizes_is_a_warning() -> None:
    frozen = ControlFacts("the load of a router is not known")
    found = judged(state(), WELL, "", running=True, control=frozen)
    assert found.sentence.startswith("Requests are served, but pool sizes are kept: the load of a router")


@pytest.mark.parametrize(
    ("explanation", "facts"),
    [
        ({"by_hand": [{"pool": "decode", "size": 3, "serving": 1}]}, ControlFacts("", {"decode": 3})),
        ({"by_hand": [], "pools": [], "frozen": None}, ControlFacts()),
        ({"by_hand": [], "pools": [], "frozen": "no router yet"}, ControlFacts("no router yet")),
    ],
    ids=["no planner", "sizes", "keeps sizes"],
)
def test_a_control_process_is_asked_why_it_keeps_sizes(
    tmp_path: Path, explanation: dict[str, Any], facts: ControlFacts
) -> None:
    with listening(socket_path(tmp_path)) as commands:

        def answer() -> None:
            if (taken := commands.wait(10.0)) is not None:
                taken[1].tell("done", explanation=explanation)

        thread = threading.Thread(target=answer)
        thread.start()
        assert control_facts(state(temp_dir=str(tmp_path))) == facts
        thread.join()


def test_without_a_control_process_nothing_is_known_of_sizes(tmp_path: Path) -> None:
    assert control_facts(state(temp_dir=str(tmp_path))) == ControlFacts()


@pytest.mark.parametrize(
    ("problems", "status"),
    [
        ([], 0),
        ([problem("warning", "worker_draining")], 0),
        ([problem("degraded", "brownout")], 1),
        ([problem("down", "not_ready"), problem("warning", "tier")], 1),
    ],
    ids=["well", "warning", "degraded", "down"],
)
def test_the_exit_status_says_whether_requests_are_served_as_promised(
    gateway: CannedGateway,
    problems: list[dict[str, str]],
    status: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    gateway.answers["/status"] = (200, page(*problems))
    assert main(["status", "--address", gateway.address]) == status
    assert main(["status", "--address", gateway.address, "-o", "json"]) == status
    text, _, encoded = capsys.readouterr().out.rpartition("\n{")
    assert text.splitlines()[0] == "?"
    assert "decode-1" in text
    for each in problems[1:]:
        assert f"  {each['severity']}: {each['text']}; {each['remedy']}" in text.splitlines()
    assert json.loads("{" + encoded)["verdict"]["problems"] == problems


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("mine", "--address", "127.0.0.1:1"), "mine names a deployment on this machine; leave it or"),
        (("--cacert", "ca.pem"), "are for a gateway that --address names"),
        (("--key", "key.pem"), "are for a gateway that --address names"),
    ],
)
def test_options_that_would_be_ignored_are_refused(
    options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", *options]) == 2
    assert message in capsys.readouterr().err


def test_in_a_pod_it_says_how_to_ask_the_gateway(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert main(["status"]) == 1
    assert "nothing runs; name the gateway: kvasir status --address" in capsys.readouterr().out
