"""The `ray start` command of KubeRay runs unchanged, and nothing else does."""

from __future__ import annotations

import sys

import pytest

from kvasir.core.errors import ConfigError
from kvasir_platform.cluster.ray.command import option, ray_start, require_token

RAY = [sys.executable, "-m", "ray.scripts.scripts", "start"]
HEAD = "ray start --head  --block  --dashboard-host=0.0.0.0  --metrics-export-port=8080  --num-cpus=0 "
WORKER = (
    "ray start  --address=kvasir-head-svc.default.svc.cluster.local:6379  --block  --memory=8589934592 "
    '--num-cpus=4  --num-gpus=1  --resources="{\\"kvasir-pool-decode\\": 1}" '
)


def told(command: str, **more: str) -> dict[str, str]:
    return {"KUBERAY_GEN_RAY_START_CMD": command, **more}


def test_what_kuberay_writes_for_a_head_is_run_in_the_foreground() -> None:
    assert ray_start(told(HEAD), "head") == [
        *RAY,
        "--head",
        "--dashboard-host=0.0.0.0",
        "--metrics-export-port=8080",
        "--num-cpus=0",
        "--block",
    ]


def test_what_kuberay_writes_for_a_worker_keeps_the_quotes_of_its_resources() -> None:
    command = ray_start(told(WORKER), "worker")
    assert '--resources={"kvasir-pool-decode": 1}' in command
    assert option(command, "--address") == "kvasir-head-svc.default.svc.cluster.local:6379"


def test_variables_that_it_names_are_filled_in_as_single_words() -> None:
    command = ray_start(
        told(
            "ray start --head --redis-password=$REDIS_PASSWORD --node-ip-address ${IP}",
            REDIS_PASSWORD="a b;c",
            IP="10.0.0.1",
        ),
        "head",
    )
    assert "--redis-password=a b;c" in command
    assert option(command, "--node-ip-address") == "10.0.0.1"


def test_an_option_that_is_not_there_has_no_value() -> None:
    assert option([*RAY, "--head"], "--port") is None


@pytest.mark.parametrize(
    "command",
    [
        "ray start --head; rm -rf /",
        "ray start --head && true",
        "ray start --head | tee log",
        "ray start --head > log",
        "ray start --head $(id)",
        "ray start --head `id`",
        "ray start --head --labels='unclosed",
        "ulimit -n 65536; ray start --head",
        "ray stop --head",
        "python start --head",
        "ray start --address=head:6379",
        "ray start --head --address=head:6379",
        "ray start --head --redis-password=$NOT_SET",
        "",
    ],
)
def test_what_is_no_single_ray_start_of_a_head_is_refused_by_name(command: str) -> None:
    with pytest.raises(ConfigError, match="KUBERAY_GEN_RAY_START_CMD"):
        ray_start(told(command), "head")


def test_a_head_is_not_run_in_the_pod_of_a_worker() -> None:
    with pytest.raises(ConfigError, match="--address"):
        ray_start(told(HEAD), "worker")


def test_without_kuberay_the_remedy_is_named() -> None:
    with pytest.raises(ConfigError, match="overwrite-container-cmd"):
        ray_start({}, "head")


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"RAY_AUTH_MODE": "token"},
        {"RAY_AUTH_TOKEN_PATH": "/t"},
        {"RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN": "x"},
    ],
)
def test_ray_does_not_start_open_to_everyone(environ: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="RAY_AUTH_MODE=token"):
        require_token(environ)


def test_a_token_in_a_file_is_enough() -> None:
    require_token({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": "/etc/kvasir/ray/token"})
