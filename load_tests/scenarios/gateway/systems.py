"""The systems under test: how each is started, and which workers are behind it."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from kvasir.config.spec.workers import TlsSpec
from kvasir.wire.tls import TlsNames
from kvasir_platform.cluster.certificates import CertificateFolder
from kvasir_platform.gateway.identity.keys import KeyEntry, hash_of, key_line, new_key
from load_tests.scenarios.gateway.pacing import TOKEN
from load_tests.scenarios.gateway.packages import Packages
from load_tests.scenarios.gateway.processes import ROOT, Child, ProcessError, free_port

WORKERS = 4
NAME = "bench"
"""Of Kvasir's deployment."""
AS_UP = "kvasir-up"
_START_S = 90.0
_MODULE = "load_tests.scenarios.gateway"
_OBSERVER = "tests.kit.observability.gateway_observer"


@dataclass(slots=True)
class System:
    """A running system. `process` is measured, with its descendants. `workers` accepts commands for the
    workers behind it, if any. `regroup` makes each of the `decoding` workers spread later streams over that
    many messages or times in a step. With `only_chunks` only streaming is measured, not requests."""

    name: str
    address: str
    process: Child
    version: str
    key: str = "none"
    workers: Child | None = None
    only_chunks: bool = False
    regroup: Callable[[int], None] | None = None
    decoding: int = WORKERS

    def order(self, do: str, **details: object) -> dict[str, object]:
        """A command to the client about this system."""
        to = {"address": self.address, "key": self.key, "pid": self.process.pid}
        return {"do": do, **to, **details}


def spec(source: Path, folder: Path, *, apart: bool) -> dict[str, Any]:
    """Kvasir's deployment: all features that `make up` enables, and API keys with a tenant's limits. `apart`
    computes prompts and outputs on separate workers."""
    engine = {"kind": "sim", "block_size": 16, "max_num_seqs": 1024, "kv_cache_bytes": 1 << 40}
    pools = [{"name": "both", "role": "both", "replicas": WORKERS, "engine": engine}]
    if apart:
        half = WORKERS // 2
        pools = [
            {"name": role, "role": role, "replicas": half, "engine": engine} for role in ("prefill", "decode")
        ]
    limits = {"requests_per_min": 10**9, "tokens_per_min": 10**12, "concurrency": 4096}
    return {
        "name": NAME,
        "model": {"source": str(source), "served_name": "bench", "max_model_len": 200_000},
        "disaggregation": "always" if apart else "never",
        "pools": pools,
        "slo": [{"name": "default", "ttft_s": 30.0, "itl_s": 1.0}],
        "tenancy": {
            "tenants": [{"name": "bench", "operator": True, "max_context_tokens": 190_000, **limits}]
        },
        "gateway": {"port": 0, "api_keys_file": str(folder / "keys")},
    }


def packages_of(tree: Path) -> dict[str, str]:
    """The variables with which `tree`'s packages are imported in place of the installed ones."""
    return {"PYTHONPATH": os.pathsep.join(str(tree / each) for each in ("platform", "router", "workers"))}


class Stand:
    """Starts systems, and stops them when the context ends."""

    def __init__(self, folder: Path, source: Path, packages: Packages) -> None:
        self._folder = folder
        self._source = source
        self._packages = packages
        self._stack = contextlib.ExitStack()
        self._http: tuple[Child, list[str]] | None = None

    def __enter__(self) -> Stand:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def child(
        self,
        name: str,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        *,
        talks: bool = True,
        tree: Path = ROOT,
    ) -> Child:
        """Start a process in the checkout `tree`."""
        child = Child(name, argv, self._folder, env, talks=talks, tree=tree)
        self._stack.callback(child.stop)
        return child

    def client(self) -> Child:
        """The client process."""
        return self.child("client", [sys.executable, "-m", f"{_MODULE}.client"])

    def direct(self) -> System:
        """The HTTP workers without a gateway."""
        child, addresses = self._http_workers()
        return System("direct", addresses[0], child, "")

    def observed(self, kind: str, **tracing: int) -> System:
        """The router process of as_up() with everything on by which operators see what it does: costs in a
        file, traces, exemplars, the console open, and metrics scraped. `tracing` are fields of TelemetrySpec
        that differ from their defaults."""
        observer = self.child(f"observer-{kind}", [sys.executable, "-m", _OBSERVER])
        collector = observer.hear(_START_S)["collector"]
        name = f"observed-{kind}"
        fields = {
            "telemetry": {"otlp_endpoint": collector, "exemplars": True, **tracing},
            "cost": {"file": str(self._folder / f"{name}.sqlite")},
        }
        system = self.as_up(name, fields)
        observer.ask({"address": system.address, "key": system.key})
        return system

    def as_up(self, name: str = AS_UP, fields: Mapping[str, Any] | None = None) -> System:
        """The router process as `kvasir up` starts it: prefill and decode apart, and sessions that present
        certificates on both sides and a token. `fields` as in kvasir()."""
        folder = self._folder / f"{name}-secrets"
        folder.mkdir()
        token = folder / "token"
        token.write_text(secrets.token_hex(32))
        tls, roles = TlsSpec(), ("prefill", "decode")
        names = TlsNames(tls.trust_domain, NAME)
        CertificateFolder(folder, names, roles, life_s=tls.rotate_h * 3600, wall_time=time.time).renew()
        secured = {
            "tls": {"mode": "files", "directory": str(folder)},
            "worker": {"session_token_file": str(token)},
        }
        return self.kvasir(apart=True, name=name, fields=secured | dict(fields or {}))

    def unobserved(self, name: str) -> System:
        """The router process of as_up() with all of that off, as far as the spec can switch it off: costs,
        traces, exemplars and records of decisions. Nothing reads its pages."""
        return self.as_up(name, {"cost": {"enabled": False}, "routing": {"decision_records": 0}})

    def kvasir(
        self,
        *,
        apart: bool = False,
        fast_path: bool = True,
        tree: Path = ROOT,
        name: str = "",
        fields: Mapping[str, Any] | None = None,
    ) -> System:
        """The router process as `make up` starts it, with static discovery, of the checkout `tree`, whose
        native extension is built. `fields` are those of the spec that are not the defaults, and `name` is
        what it is then called."""
        name = name or ("kvasir-apart" if apart else "kvasir" if fast_path else "kvasir-no-fast-path")
        if tree != ROOT:
            name += f"-{tree.name}"
        env = packages_of(tree)
        folder = self._folder / name
        folder.mkdir()
        key = new_key()
        (folder / "keys").write_text(key_line(hash_of(key), KeyEntry("bench")) + "\n")
        deployment = spec(self._source, folder, apart=apart) | dict(fields or {})
        file = folder / "kvasir.yaml"
        file.write_text(json.dumps(deployment))
        endpoints = []
        for pool in deployment["pools"]:
            argv = [sys.executable, "-m", f"{_MODULE}.kvasir_workers", str(file), pool["name"]]
            workers = self.child(f"{name}-{pool['name']}", [*argv, str(pool["replicas"])], env, tree=tree)
            said = workers.hear(_START_S)
            endpoints += [f"{pool['name']}={address}" for address in said["addresses"]]
        deployment["discovery"] = {"kind": "static", "endpoints": endpoints}
        file.write_text(json.dumps(deployment))
        argv = [sys.executable, "-m", "kvasir_platform.apps.router_app", "--deployment", str(file)]
        router = self.child(name, argv if fast_path else [*argv, "--no-fast-path"], env, tree=tree)
        address = router.hear(_START_S)["address"]
        made = System(name, address, router, "", key, workers, only_chunks=not fast_path)
        # The pool that decodes is the last one.
        made.regroup, made.decoding = partial(_regroup, workers), WORKERS // 2 if apart else WORKERS
        return made

    def haproxy(self, certificate: Path | None = None) -> System:
        """One thread, keep-alive connections on both sides. With a `certificate`, a PEM file with its key,
        clients connect over TLS."""
        version = _first_line(["haproxy", "-v"])
        port = free_port()
        servers = "".join(f"    server w{i} {at}\n" for i, at in enumerate(self._addresses()))
        config = self._folder / "haproxy.cfg"
        tls = f" ssl crt {certificate}" if certificate else ""
        config.write_text(
            "global\n    nbthread 1\n    maxconn 4096\n"
            "defaults\n    mode http\n"
            "    timeout connect 5s\n    timeout client 60s\n    timeout server 60s\n"
            "    option http-keep-alive\n    option http-no-delay\n    http-reuse always\n"
            f"frontend f\n    bind 127.0.0.1:{port}{tls}\n    default_backend b\n"
            f"backend b\n    balance leastconn\n{servers}"
        )
        argv = ["haproxy", "-db", "-q", "-f", str(config)]
        system = self._proxy("haproxy", argv, port, version)
        if certificate:
            system.address = f"https://{system.address}"
        return system

    def nginx(self) -> System:
        """One worker process, keep-alive connections on both sides."""
        version = _first_line(["nginx", "-v"])
        port = free_port()
        servers = "".join(f"server {at};" for at in self._addresses())
        config = self._folder / "nginx.conf"
        config.write_text(
            f"daemon off; worker_processes 1; pid {self._folder}/nginx.pid; error_log stderr error;\n"
            "events { worker_connections 8192; }\n"
            f"http {{ access_log off; client_max_body_size 16m; client_body_buffer_size 1m;\n"
            f"client_body_temp_path {self._folder}/ng1; proxy_temp_path {self._folder}/ng2;\n"
            f"fastcgi_temp_path {self._folder}/ng3; uwsgi_temp_path {self._folder}/ng4;\n"
            f"scgi_temp_path {self._folder}/ng5;\n"
            f"keepalive_requests 1000000; upstream b {{ least_conn; {servers} keepalive 1024;\n"
            "keepalive_requests 1000000; }\n"
            f"server {{ listen 127.0.0.1:{port} backlog=1024; tcp_nodelay on; location / {{\n"
            'proxy_pass http://b; proxy_http_version 1.1; proxy_set_header Connection "";\n'
            "proxy_buffering off; } } }\n"
        )
        argv = ["nginx", "-c", str(config)]
        return self._proxy("nginx", argv, port, version)

    def sglang_router(self) -> System:
        """Cache-aware routing with default settings."""
        package = self._packages.get("sglang-router")
        port = free_port()
        argv = [str(package.python), "-m", "sglang_router.launch_router", "--policy", "cache_aware"]
        argv += ["--log-level", "warn"]
        argv += ["--prometheus-port", str(free_port()), *self._listen(port)]
        return self._proxy("sglang-router", argv, port, package.version)

    def vllm_router(self) -> System:
        """Cache-aware routing with default settings."""
        package = self._packages.get("vllm-router")
        port = free_port()
        argv = [
            str(package.python.parent / "vllm-router"),
            "--policy",
            "cache_aware",
            "--log-level",
            "warning",
        ]
        argv += ["--prometheus-port", str(free_port()), *self._listen(port)]
        return self._proxy("vllm-router", argv, port, package.version)

    def dynamo(self) -> System:
        """The frontend in KV mode with its fast tokenizer; it predicts caches from its own decisions."""
        package = self._packages.get("ai-dynamo")
        port = free_port()
        env = {
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_FILE_KV": str(self._folder / "dynamo"),
            "DYN_REQUEST_PLANE": "tcp",
            "DYN_EVENT_PLANE": "zmq",
            "DYN_LOG": "warn",
            "HF_HUB_OFFLINE": "1",
        }
        token = Tokenizer.from_file(str(self._source / "tokenizer.json")).encode(
            TOKEN, add_special_tokens=False
        )
        program = str(ROOT / "load_tests" / "peers" / "dynamo_gateway.py")
        modules = str(Path(__file__).parent)
        argv = [str(package.python), program, modules, str(self._source), str(token.ids[0])]
        workers = [self.child(f"dynamo-worker-{n}", argv, env, talks=False) for n in range(WORKERS)]
        argv = [str(package.python), "-m", "dynamo.frontend", "--http-host", "127.0.0.1"]
        argv += ["--http-port", str(port), "--router-mode", "kv", "--no-router-kv-events"]
        argv += ["--tokenizer", "fastokens", "--no-tokenizer-fallback"]
        system = self._proxy("dynamo", argv, port, package.version, env)
        system.regroup = partial(_regroup_silently, workers)
        return system

    def _proxy(
        self, name: str, argv: Sequence[str], port: int, version: str, env: Mapping[str, str] | None = None
    ) -> System:
        child = self.child(name, argv, env, talks=False)
        regroup = partial(_regroup, self._http_workers()[0])
        return System(name, f"127.0.0.1:{port}", child, version, regroup=regroup)

    def _listen(self, port: int) -> list[str]:
        urls = [f"http://{address}" for address in self._addresses()]
        return ["--host", "127.0.0.1", "--port", str(port), "--worker-urls", *urls]

    def _addresses(self) -> list[str]:
        return self._http_workers()[1]

    def _http_workers(self) -> tuple[Child, list[str]]:
        if self._http is None:
            argv = [sys.executable, "-m", f"{_MODULE}.http_worker", str(WORKERS)]
            child = self.child("http-workers", argv)
            self._http = child, child.hear(_START_S)["addresses"]
        return self._http


def await_serving(client: Child, system: System) -> None:
    """Send requests until one is answered. Raise ProcessError with the end of its output."""
    deadline = time.monotonic() + _START_S
    while True:
        answer = client.ask(system.order("ttft", count=1))
        if "error" not in answer:
            return
        if not system.process.alive or time.monotonic() > deadline:
            words = system.process.words()
            raise ProcessError(f"{system.name} does not answer: {answer['error']} {words}"[:600])
        time.sleep(0.3)


def _regroup(workers: Child, groups: int) -> None:
    workers.ask({"groups": groups})


def _regroup_silently(workers: Sequence[Child], groups: int) -> None:
    # What they print goes into their logs.
    for worker in workers:
        worker.tell({"groups": groups})


def _first_line(argv: Sequence[str]) -> str:
    try:
        run = subprocess.run(argv, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise ProcessError(f"{argv[0]} is not installed") from None
    return (run.stdout + run.stderr).splitlines()[0].strip()
