"""Scorecard row 20, with the production transport: which peers without a valid identity are accepted, and how
a rotation of certificates and authorities affects running streams.

    python -m load_tests.scenarios.scorecard.security.tls_trials

prints the counts as one JSON object. Everything runs in one process over loopback. The engine is simulated,
and its cache holds blocks, so that a snapshot is not empty.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import grpc.aio

from kvasir.clock import MonotonicClock
from kvasir.config.spec.deployment import Deployment, EngineSpec, PoolSpec, SimSpec
from kvasir.core.errors import ProtocolError
from kvasir.core.membership import Endpoint
from kvasir.core.messages import EncodedStep, Hello, Submit
from kvasir.core.requests import EngineRequest, Role, Sampling, token_ids
from kvasir.ports.session import ConnectionLost
from kvasir.wire.codec import SERVICE, encode_snapshot_request, encode_to_worker
from kvasir.wire.tls import KeyMaterial, TlsFiles, TlsNames, TlsPaths
from kvasir_platform.cluster.certificates import (
    CA_FILE,
    ROUTER_FILE,
    Authority,
    CertificateFolder,
    worker_file,
)
from kvasir_router.sessions.grpc_transport import DialTls, GrpcDialer, GrpcDialLimits
from kvasir_router.sessions.session import SessionEvent, SessionMessage, SessionReady, WorkerSession
from kvasir_workers.engines.sim.engine import SimEngine
from kvasir_workers.server.grpc_server import GrpcServer, ServerTls
from kvasir_workers.server.sessions import SessionHost

TOKEN = "the session token"
POOL = "decode"
NAMES = TlsNames("kvasir.local", "shop")
HOUR_S = 3600.0
# A refused dial ends at once; this bounds one that hangs, on a busy machine.
LIMITS = GrpcDialLimits(connect_timeout_s=10.0, part_timeout_s=10.0)


class Unchecked(TlsFiles):
    """Certificates that an honest process would refuse to start with."""

    def __init__(self, ca: bytes, own: bytes) -> None:
        self._unchecked = KeyMaterial(ca, own, own, 0.0, 0.0)

    def current(self) -> KeyMaterial:
        return self._unchecked

    def invalid(self) -> str:
        return ""


@dataclass
class Counts:
    """`attempts` of impostors; how many of them got a session or a block of KV; streams, and those that were
    interrupted or incomplete; connections made between changes of certificates."""

    attempts: int = 0
    accepted: int = 0
    streams: int = 0
    dropped: int = 0
    rotations: int = 0
    connections: int = 0
    refusals: dict[str, str] = field(default_factory=dict)
    """The response that each impostor received."""


@dataclass
class Worker:
    """A simulated worker behind the production server."""

    host: SessionHost
    address: str

    @classmethod
    @asynccontextmanager
    async def serve(cls, tls: ServerTls | None, *, claims: str = POOL) -> AsyncIterator[Worker]:
        """A worker that claims to be of pool `claims`, until the context ends."""
        pool = PoolSpec(name=claims, role=Role.BOTH, engine=EngineSpec(kind="sim", sim=SimSpec()))
        spec = Deployment(name=NAMES.deployment, disaggregation="never", pools=(pool,))
        clock = MonotonicClock()
        engine = SimEngine(spec, pool, clock=clock)
        host = await SessionHost.start(engine, worker_id="w", epoch=1, clock=clock)
        server = GrpcServer(host.serve, bind="127.0.0.1:0", token=TOKEN, snapshot=host.snapshot, tls=tls)
        try:
            yield cls(host, f"127.0.0.1:{await server.start()}")
        finally:
            await host.close()
            await server.stop(0)
            await engine.stop()


class Issuers:
    """The deployment's authority, a foreign one, and the certificates that each issues."""

    def __init__(self, now: float) -> None:
        self._now = now
        self.ours = Authority.make("ours", now - HOUR_S, now + HOUR_S)
        self.foreign = Authority.make("foreign", now - HOUR_S, now + HOUR_S)

    def router(self, names: TlsNames = NAMES, *, by: Authority | None = None, age_h: float = 0.0) -> bytes:
        """A router's certificate, valid for two hours around `age_h` hours ago."""
        return self._certify(names.router, names.router_dns, by, age_h)

    def worker(
        self, names: TlsNames = NAMES, *, pool: str = POOL, by: Authority | None = None, age_h: float = 0.0
    ) -> bytes:
        """A worker's certificate, likewise."""
        return self._certify(names.worker(pool), names.worker_dns(pool), by, age_h)

    def _certify(self, uri: str, dns: str, by: Authority | None, age_h: float) -> bytes:
        middle = self._now - age_h * HOUR_S
        return (by or self.ours).certify(uri, dns, middle - HOUR_S, middle + HOUR_S)


def router_tls(ca: bytes, own: bytes) -> DialTls:
    """A router that presents `own`, even if it is not a router's certificate."""
    return DialTls(Unchecked(ca, own), NAMES, POOL)


def worker_tls(ca: bytes, own: bytes) -> ServerTls:
    """A worker that presents `own`, even if it is not a worker's certificate."""
    return ServerTls(Unchecked(ca, own), NAMES.router)


def bad_routers(issuers: Issuers) -> Iterator[tuple[str, GrpcDialer]]:
    """Names and dialers that an honest worker must not serve."""
    ca, foreign = issuers.ours.pem, issuers.foreign
    other = TlsNames(NAMES.trust_domain, "other")
    other_host = TlsNames("evil.example", NAMES.deployment)
    for name, own in (
        ("router of a foreign authority", issuers.router(by=foreign)),
        ("router with an expired certificate", issuers.router(age_h=3)),
        ("router with a certificate of tomorrow", issuers.router(age_h=-24)),
        ("router of another deployment", issuers.router(other)),
        ("router of another trust domain", issuers.router(other_host)),
        ("worker posing as a router", issuers.worker()),
    ):
        yield name, GrpcDialer(TOKEN, LIMITS, tls=router_tls(ca, own))
    good = router_tls(ca, issuers.router())
    yield "router with a wrong token", GrpcDialer("guessed", LIMITS, tls=good)
    yield "router without a token", GrpcDialer(None, LIMITS, tls=good)
    yield "router in plain text", GrpcDialer(TOKEN, LIMITS)


def bad_workers(issuers: Issuers) -> Iterator[tuple[str, ServerTls | None, str]]:
    """Names, the certificate that the worker presents, and the pool it claims; an honest router must not use
    it."""
    ca, foreign = issuers.ours.pem, issuers.foreign
    other = TlsNames(NAMES.trust_domain, "other")
    for name, own in (
        ("worker of a foreign authority", issuers.worker(by=foreign)),
        ("worker with an expired certificate", issuers.worker(age_h=3)),
        ("worker with a certificate of tomorrow", issuers.worker(age_h=-24)),
        ("worker of another deployment", issuers.worker(other)),
        ("worker of another pool", issuers.worker(pool="prefill")),
        ("router posing as a worker", issuers.router()),
    ):
        yield name, worker_tls(ca, own), POOL
    yield "worker that claims another pool", worker_tls(ca, issuers.worker()), "prefill"
    yield "worker in plain text", None, POOL


async def impostors(counts: Counts) -> None:
    """Let each impostor try to get a session and a snapshot. An honest pair succeeds before and after, so
    that refusing everyone does not pass."""
    issuers = Issuers(time.time())
    ca = issuers.ours.pem
    honest = GrpcDialer(TOKEN, LIMITS, tls=router_tls(ca, issuers.router()))
    async with Worker.serve(worker_tls(ca, issuers.worker())) as worker:
        await _fill_cache(honest, worker)
        sessions = worker.host.sessions
        for name, dialer in bad_routers(issuers):
            await _try(counts, name, dialer, worker)
        counts.attempts += 1
        counts.accepted += await _without_certificate(worker, ca)
        if worker.host.sessions != sessions:
            raise AssertionError("an impostor's session exists")
        if await _kv_parts(honest, worker) == 0:
            raise AssertionError("an honest router gets no snapshot")
    for name, tls, claims in bad_workers(issuers):
        async with Worker.serve(tls, claims=claims) as bad:
            # A worker that claims another pool has a valid certificate, so its snapshot is legitimate.
            await _try(counts, name, honest, bad, snapshot=claims == POOL)


async def rotation(counts: Counts, folder: Path, *, streams: int = 16, tokens: int = 160) -> None:
    """Run `streams` through one session while certificates are changed, and the authority twice. At each
    change, connect another router and take a snapshot."""
    made = CertificateFolder(folder, NAMES, [POOL], life_s=HOUR_S, wall_time=time.time)
    made.renew()
    dialer = _dialer(folder)
    server = ServerTls(
        _files(folder, worker_file(POOL), NAMES.worker(POOL), NAMES.worker_dns(POOL)), NAMES.router
    )
    async with Worker.serve(server) as worker:
        load = Load(streams, tokens)
        await load.start(dialer, worker.address)
        changes = (True, False, True, False, False)
        for number, new_authority in enumerate(changes, start=1):
            at = number * tokens // (2 * len(changes))
            await load.until(lambda at=at: load.slowest >= at)  # type: ignore[misc]  # bound at once
            made.renew(new_authority=new_authority)
            counts.rotations += 1
            # A router that starts at this moment has none of the earlier certificates.
            connection = await _dialer(folder).dial(worker.address, Hello(f"other-{number}", "", 0))
            await connection.close()
            await _kv_parts(dialer, worker)
            counts.connections += 2
            if load.slowest >= tokens:
                raise AssertionError("the streams were over before the certificates had changed")
        await load.until(lambda: load.whole == streams or load.interrupted)
        counts.streams += streams
        counts.dropped += streams if load.interrupted else streams - load.whole
        await load.close()


class Load:
    """Streams of one router's session, each checked for lost and repeated tokens."""

    def __init__(self, streams: int, tokens: int) -> None:
        self._tokens = tokens
        self._got = {f"r{number}": 0 for number in range(streams)}
        self._wrong: set[str] = set()
        self._changed = asyncio.Event()
        self._running: asyncio.Task[None] | None = None
        self._session: WorkerSession | None = None
        self.reported: list[SessionEvent] = []

    @property
    def slowest(self) -> int:
        """Tokens that every stream has."""
        return min(self._got.values())

    @property
    def whole(self) -> int:
        """Streams that have every token once."""
        return sum(got == self._tokens and one not in self._wrong for one, got in self._got.items())

    @property
    def interrupted(self) -> bool:
        """Whether anything happened to the session since it was ready."""
        return len(self.reported) > 1

    async def start(self, dialer: GrpcDialer, address: str) -> None:
        self._session = WorkerSession(
            Endpoint("w", address, POOL),
            dialer,
            clock=MonotonicClock(),
            rng=random.Random(20),
            on_event=self._take,
            router_id="router",
        )
        self._running = asyncio.create_task(self._session.run())
        await self.until(lambda: bool(self.reported))
        if not isinstance(self.reported[0], SessionReady):
            raise AssertionError(f"the session did not begin: {self.reported[0]}")
        sampling = Sampling(max_tokens=self._tokens, ignore_eos=True)
        requests = (
            EngineRequest(one, token_ids(range(number * 64, number * 64 + 64)), sampling)
            for number, one in enumerate(self._got)
        )
        self._session.send(Submit(tuple(requests)))

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def close(self) -> None:
        if self._session is not None and self._running is not None:
            await self._session.close()
            await self._running

    def _take(self, event: SessionEvent) -> None:
        if not isinstance(event, SessionMessage):
            self.reported.append(event)
        elif isinstance(event.message, EncodedStep):
            for delta in event.message.decode(None).deltas:
                if delta.offset != self._got[delta.request_id] or delta.error is not None:
                    self._wrong.add(delta.request_id)
                self._got[delta.request_id] += len(delta.token_ids)
        self._changed.set()


async def run_row(folder: Path) -> Counts:
    """The whole row; `folder` is empty and private."""
    counts = Counts()
    await impostors(counts)
    await rotation(counts, folder)
    return counts


def _dialer(folder: Path) -> GrpcDialer:
    files = _files(folder, ROUTER_FILE, NAMES.router, NAMES.router_dns)
    return GrpcDialer(TOKEN, LIMITS, tls=DialTls(files, NAMES, POOL))


def _files(folder: Path, file: str, uri: str, dns: str) -> TlsFiles:
    paths = TlsPaths(folder / CA_FILE, folder / file, folder / file)
    return TlsFiles(paths, uri=uri, dns=dns, wall_time=time.time)


async def _fill_cache(dialer: GrpcDialer, worker: Worker) -> None:
    load = Load(1, 4)
    await load.start(dialer, worker.address)
    await load.until(lambda: load.whole == 1)
    await load.close()


async def _try(
    counts: Counts, name: str, dialer: GrpcDialer, worker: Worker, *, snapshot: bool = True
) -> None:
    counts.attempts += 1
    try:
        connection = await dialer.dial(worker.address, Hello("impostor", "", 0))
    except (ConnectionLost, ProtocolError) as error:
        counts.refusals[name] = str(error)
    else:
        counts.accepted += 1
        await connection.close()
    if snapshot:
        counts.attempts += 1
        try:
            counts.accepted += await _kv_parts(dialer, worker) > 0
        except (ConnectionLost, ProtocolError) as error:
            counts.refusals[f"{name}, snapshot"] = str(error)


async def _kv_parts(dialer: GrpcDialer, worker: Worker) -> int:
    return len([part async for part in dialer.snapshot(worker.address, 0)])


async def _without_certificate(worker: Worker, ca: bytes) -> int:
    """Make calls as a client that trusts the worker and presents no certificate; return how many were
    answered."""
    options = [("grpc.ssl_target_name_override", NAMES.worker_dns(POOL))]
    metadata = (("authorization", f"Bearer {TOKEN}"),)
    answered = 0
    async with grpc.aio.secure_channel(
        worker.address, grpc.ssl_channel_credentials(ca), options=options
    ) as channel:
        for method, message in (
            ("Session", encode_to_worker(Hello("impostor", "", 0))),
            ("Snapshot", encode_snapshot_request(0)),
        ):
            call = channel.unary_stream(f"/{SERVICE}/{method}", None, None)(
                message, metadata=metadata, timeout=LIMITS.connect_timeout_s
            )
            try:
                answered += isinstance(await call.read(), bytes)
            except grpc.aio.AioRpcError:
                continue
    return answered


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="kvasir-tls-") as folder:
        counts = asyncio.run(run_row(Path(folder)))
    print(json.dumps({name: getattr(counts, name) for name in counts.__dataclass_fields__}, indent=2))
    return 1 if counts.accepted or counts.dropped else 0


if __name__ == "__main__":
    sys.exit(main())
