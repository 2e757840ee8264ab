"""The router builds the discovery adapter that its spec names, and reports missing settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvasir.clock import MonotonicClock
from kvasir.config.load.loader import load
from kvasir.core.errors import ConfigError
from kvasir_platform.apps.router_app import build_discovery
from kvasir_platform.cluster.kubernetes.discovery import KubernetesDiscovery
from kvasir_router.sessions.static_discovery import StaticDiscovery


def test_kubernetes_is_taken_in_a_pod_with_its_own_namespace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    account = f"discovery.kubernetes.credentials_dir={tmp_path}"
    deployment = load(None, ["discovery.kind=kubernetes", account])
    with pytest.raises(ConfigError, match="the pod's namespace cannot be read"):
        build_discovery(deployment, None, MonotonicClock())
    (tmp_path / "namespace").write_text("prod\n")
    assert isinstance(build_discovery(deployment, None, MonotonicClock()), KubernetesDiscovery)


def test_kubernetes_outside_a_cluster_and_ray_without_an_address_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ConfigError, match="inside a cluster only"):
        build_discovery(load(None, ["discovery.kind=kubernetes"]), None, MonotonicClock())
    with pytest.raises(ConfigError, match="--ray-address"):
        build_discovery(load(None), None, MonotonicClock())


def test_a_fixed_list_needs_neither() -> None:
    deployment = load(None, ["discovery={kind: static, endpoints: ['decode=h:1']}"])
    assert isinstance(build_discovery(deployment, None, MonotonicClock()), StaticDiscovery)
