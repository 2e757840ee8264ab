"""Checks of a live cluster find what goes wrong, and nothing in one that behaves."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from load_tests.cluster_checks.checks import CHECKS
from load_tests.cluster_checks.findings import Finding
from load_tests.cluster_checks.run import main
from load_tests.cluster_checks.site import Site
from load_tests.cluster_checks.tools import CommandError
from tests.kit.cluster.live_cluster import QUIET, LiveCluster, LivePod

PAGE = Path(__file__).resolve().parents[3] / "docs" / "CLUSTER_CHECKS.md"


def found(name: str, cluster: LiveCluster) -> list[Finding]:
    return list(CHECKS[name].act(Site(cluster, "llm", "kvasir")))


def bad(name: str, cluster: LiveCluster) -> list[str]:
    """What is not as expected."""
    return [each.what for each in found(name, cluster) if not each.met]


@pytest.mark.parametrize("name", [*CHECKS])
def test_a_release_that_behaves_is_as_expected(name: str) -> None:
    findings = found(name, LiveCluster(gpus=int(name == "fit")))
    assert [each.line() for each in findings if not each.met] == []
    assert any(each.expected for each in findings)


@pytest.mark.parametrize(
    ("name", "wrong", "what"),
    [
        ("head", {"engines_end_with_head": True}, "engines with the same processes"),
        ("head", {"head_end_s": 61.0}, "longest end of the head's pod"),
        ("readiness", {"routers_follow_workers": True}, "looks at which a router was not ready, of 30"),
        ("upgrades", {"lives": 3}, "pods thrown away"),
        ("reinstall", {"uninstall_s": 300.0}, "helm uninstall"),
        ("failing", {"silent": True}, "the status has the engine's error"),
        ("failing", {"silent": True}, "an event of the RayCluster has the error"),
        ("threads", {"policy": "ACTIVE"}, "OMP_WAIT_POLICY of engines"),
        ("fit", {"gpus": 1, "refused": False}, "an upgrade to GPUs that are too small is refused"),
    ],
)
def test_what_goes_wrong_is_found(name: str, wrong: dict[str, Any], what: str) -> None:
    assert any(each.startswith(what) for each in bad(name, LiveCluster(**wrong)))


@pytest.mark.parametrize(
    ("noticed", "what"),
    [
        ({"failed": 1, "errors": ["502: gone"]}, "failed requests, of 41"),
        ({"refused_with_wait": 1}, "failed requests, of 41"),
        ({"longest_gap_s": 41.0}, "longest gap of a stream"),
    ],
)
def test_clients_must_notice_nothing_of_a_lost_head(noticed: dict[str, Any], what: str) -> None:
    assert bad("head", LiveCluster(noticed={**QUIET, **noticed})) == [what]


def test_without_workers_a_request_may_be_refused_with_the_time_to_ask_again_only() -> None:
    assert bad("readiness", LiveCluster(noticed={**QUIET, "refused_with_wait": 5})) == []
    noticed = {**QUIET, "refused_without_wait": 1}
    assert bad("readiness", LiveCluster(noticed=noticed)) == ["failed requests, of 41"]


def test_without_a_volume_engines_end_with_redis_and_are_not_held_against_the_release() -> None:
    findings = {each.what: each for each in found("redis", LiveCluster(volume=False))}
    assert findings["engines that outlived it"].found == "0"
    assert "engines with the same processes" not in findings


@pytest.mark.parametrize(("version", "forced"), [("v3.19.0", False), ("v4.1.0", True)])
def test_helm_4_takes_the_raycluster_back_from_rays_autoscaler(version: str, forced: bool) -> None:
    cluster = LiveCluster(helm=version)
    found("rollback", cluster)
    changes = [each for each in cluster.asked if re.match(r"helm -n llm (upgrade|rollback)", each)]
    assert [("--force-conflicts" in each) for each in changes] == [forced, forced]


def test_whether_models_fit_is_a_question_for_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--namespace", "llm", "--only", "fit"], LiveCluster()) == 1
    assert "BAD no pool has a GPU" in capsys.readouterr().out


def test_the_key_of_the_load_stands_in_no_argument() -> None:
    cluster = LiveCluster()
    found("head", cluster)
    assert [each for each in cluster.asked if "key-0.0" in each and not each.startswith("{")] == []


def test_checks_are_made_by_name_and_their_result_is_the_exit_status(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["--namespace", "llm", "--only", "small,head"]
    assert main(arguments, LiveCluster()) == 0
    assert "all as expected" in capsys.readouterr().out
    assert main(arguments, LiveCluster(head_end_s=20.0)) == 1
    assert capsys.readouterr().out.endswith("not as expected: head\n")


def test_a_release_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    class Nothing(LiveCluster):
        def _ray_cluster(self) -> Any:
            raise AssertionError

        def _get(self, kind: str, text: str) -> str:
            return '{"items": []}'

    assert main(["--namespace", "llm", "--only", "small"], Nothing()) == 1
    assert "0 RayClusters of the release kvasir, not one" in capsys.readouterr().out


def test_a_control_process_that_does_not_answer_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    class Mute(LiveCluster):
        def _exec(self, pod: LivePod, words: Sequence[str]) -> str:
            return "" if "status" in words else super()._exec(pod, words)

    assert main(["--namespace", "llm", "--only", "small"], Mute()) == 1
    assert "BAD the control process does not say how its pools are" in capsys.readouterr().out


def test_a_second_release_that_is_refused_is_told_by_that_error(capsys: pytest.CaptureFixture[str]) -> None:
    class Full(LiveCluster):
        def _helm(self, words: Sequence[str]) -> str:
            if words[0] == "install":
                raise CommandError("helm install: exceeded quota")
            if words[0] == "uninstall" and "--ignore-not-found" not in words:
                raise CommandError("helm uninstall: release: not found")
            return super()._helm(words)

    assert main(["--namespace", "llm", "--only", "failing"], Full()) == 1
    assert "BAD helm install: exceeded quota" in capsys.readouterr().out


def test_the_page_has_each_check() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `([a-z]+)` \|", text, re.MULTILINE)) == set(CHECKS)
