"""The options of `kvasir picker`."""

from __future__ import annotations

import argparse
import ipaddress
from pathlib import Path

from kvasir.core.errors import ConfigError
from kvasir.core.membership import is_worker_address
from kvasir_platform.cli.common.numbers import positive, whole
from kvasir_platform.cli.common.parsers import Add

_COUNT = whole(1, 1 << 30)

_EPILOG = """\
Runs an endpoint picker of the Gateway API Inference Extension: Envoy, Istio or GKE gateways ask it over
ext-proc which model server of an InferencePool gets a request. It decides with Kvasir's prefix index and cost
model, and names the endpoint in x-gateway-destination-endpoint. docs/GATEWAY_API.md has the protocol and its
limits.

examples:
  kvasir picker --pool llama --host 0.0.0.0 --tls-cert tls.crt --tls-key tls.key
  kvasir picker --endpoint 10.0.0.7:8000 --endpoint 10.0.0.8:8000"""


def add_picker(add: Add) -> None:
    """Add the command."""
    picker = add("picker", "pick model servers for a gateway with an InferencePool", epilog=_EPILOG)
    where = picker.add_mutually_exclusive_group(required=True)
    where.add_argument(
        "--endpoint", action="append", default=[], metavar="IP:PORT", help="a model server (repeatable)"
    )
    where.add_argument("--pool", metavar="NAME", help="an InferencePool of this cluster")
    picker.add_argument("--namespace", metavar="NAME", help="the pool's namespace (the pod's)")
    picker.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="address to bind (127.0.0.1)")
    picker.add_argument(
        "--port", type=whole(0, 65_535), default=9002, metavar="N", help="port to bind (9002); 0: a free one"
    )
    picker.add_argument("--tls-cert", type=Path, metavar="FILE", help="PEM certificate chain")
    picker.add_argument("--tls-key", type=Path, metavar="FILE", help="PEM private key of the certificate")
    picker.add_argument(
        "--max-requests",
        type=_COUNT,
        default=256,
        metavar="N",
        help="requests at an endpoint at the same time (256); beyond it, 429",
    )
    picker.add_argument(
        "--kv-tokens",
        type=_COUNT,
        default=1 << 18,
        metavar="N",
        help="tokens that an endpoint's cache holds (262144)",
    )
    picker.add_argument(
        "--predicted-ttl",
        type=positive,
        default=300.0,
        metavar="S",
        help="how long a prompt is taken to stay in a cache, in seconds (300)",
    )
    picker.add_argument("--policy", default="cost", metavar="NAME", help="routing policy (cost)")
    picker.add_argument(
        "--conformance",
        action="store_true",
        help="obey test-epp-endpoint-selection, for the extension's conformance tests only",
    )


def _is_ip_port(text: str) -> bool:
    """Gateways take addresses, and no names of hosts."""
    try:
        ipaddress.ip_address(text.rpartition(":")[0].strip("[]"))
    except ValueError:
        return False
    return is_worker_address(text)


def run_picker(args: argparse.Namespace) -> int:
    """Run it until it is stopped. Raises ConfigError."""
    from kvasir_platform.apps.picker_app import PickerOptions, run
    from kvasir_platform.picker.endpoints import PickerLimits

    if (args.tls_cert is None) != (args.tls_key is None):
        raise ConfigError("picker: --tls-cert and --tls-key belong together; give both")
    for endpoint in args.endpoint:
        if not _is_ip_port(endpoint):
            raise ConfigError(f"picker: --endpoint {endpoint}: write IP:PORT, as in 10.0.0.7:8000")
    limits = PickerLimits(
        max_requests=args.max_requests,
        kv_tokens=args.kv_tokens,
        predicted_ttl_s=args.predicted_ttl,
        policy=args.policy,
    )
    return run(
        PickerOptions(
            host=args.host,
            port=args.port,
            endpoints=tuple(args.endpoint),
            pool=args.pool,
            namespace=args.namespace,
            tls_cert=args.tls_cert,
            tls_key=args.tls_key,
            test_headers=args.conformance,
            limits=limits,
        )
    )
