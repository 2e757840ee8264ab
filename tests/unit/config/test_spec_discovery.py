"""Discovery through Kubernetes needs only its name; invalid settings are refused with their path."""

from __future__ import annotations

import pytest

from kvasir.config.load.loader import load
from kvasir.core.errors import ConfigError


def test_the_kind_is_all_that_has_to_be_said() -> None:
    spec = load(None, ["discovery.kind=kubernetes"]).discovery
    assert spec.kubernetes.namespace is None
    assert spec.kubernetes.port == "session"
    assert spec.kubernetes.credentials_dir == "/var/run/secrets/kubernetes.io/serviceaccount"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("namespace", "../kube-system"),
        ("namespace", "Prod"),
        ("port", "a-name-of-sixteen"),
        ("port", "Session"),
        ("address_family", "both"),
        ("request_timeout_s", "0"),
        ("resync_s", "1"),
        ("token", "secret"),
    ],
)
def test_what_cannot_be_asked_of_an_api_server_is_refused_with_its_path(field: str, value: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(None, ["discovery.kind=kubernetes", f"discovery.kubernetes.{field}={value}"])
    assert f"discovery.kubernetes.{field}" in refused.value.message
