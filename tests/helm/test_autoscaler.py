"""Ray's autoscaler, which KubeRay puts into the head's pod, ends with the pod."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
from tests.helm.rendering import render

RAY = """#!/bin/sh
echo "$@" >{told}
exec sleep 600
"""
END_S = 10.0
IS_ROOT = os.geteuid() == 0


@pytest.mark.skipif(not IS_ROOT, reason="a process namespace needs root")
def test_the_autoscaler_ends_when_its_pod_is_asked_to(tmp_path: Path) -> None:
    """The container's command as the first process of a process namespace, as in a container."""
    (head,) = (pod for pod in render().pods() if pod.component == "head")
    (container,) = (each for each in head.containers if each["name"] == "autoscaler")
    told = tmp_path / "told"
    os.mkfifo(told)
    (tmp_path / "ray").write_text(RAY.format(told=told))
    (tmp_path / "ray").chmod(0o755)
    outer = subprocess.Popen(
        ["unshare", "--pid", "--fork", "--kill-child", *container["command"], *container["args"]],
        env={
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "RAY_CLUSTER_NAME": "llm-kvasir",
            "RAY_CLUSTER_NAMESPACE": "serving",
        },
    )
    try:
        assert told.read_text().split() == [
            "kuberay-autoscaler",
            *("--cluster-name", "llm-kvasir", "--cluster-namespace", "serving"),
        ]
        (first,) = psutil.Process(outer.pid).children()
        first.send_signal(signal.SIGTERM)
        assert outer.wait(END_S) == 0
    finally:
        outer.kill()
        outer.wait()
