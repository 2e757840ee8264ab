"""A Kubernetes API server for tests: HTTPS, bearer tokens, RBAC, and any collection by its path.

For clients it behaves like the real one: lists paginated at one version, watches that resume from a version,
bookmarks, 410 for expired versions (as a status and as an event), 409 for a stale `resourceVersion`, Status
objects for errors. It has no kinds and runs no controllers: a test creates the objects that a controller
would create, in process (`put`, `delete`) or over HTTP.

Faults are injected by a `Fault`, which applies to the next requests of its verb, and by `expire` and `cut`.
Clients may be other processes: `write_credentials` and `environment` provide what a pod gets.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.kit.cluster.api_wire import certificate_for, chunk, cut_chunk, send, send_text
from tests.kit.gateway.api_requests import Object, Refused, Request, Rule, deleting, merged, released

SLICES = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices"


@dataclass(slots=True)
class Fault:
    """A fault of the next `times` requests of `verb`: an answer with `status`; `gone` as an event of a watch;
    a connection that is cut after `cut_after` events, in the middle of the next; or `mute`, no answer, and
    for a watch only its headers."""

    verb: str
    status: int = 0
    retry_after: int | None = None
    gone: bool = False
    cut_after: int | None = None
    mute: bool = False
    times: int = 1


@dataclass(frozen=True, slots=True)
class _Change:
    version: int
    kind: str
    collection: str
    value: Object
    before: Object | None


@dataclass(slots=True)
class _Watch:
    """One watch, which has sent all events up to `since`, and is cut after `left` more events."""

    request: Request
    writer: asyncio.StreamWriter
    left: int | None
    since: int

    async def tell(self, change: _Change) -> bool:
        """Send a change; return False if the watch was cut instead."""
        self.since = change.version
        event = _event_line(self.request, change)
        if event is not None and self.left == 0:
            await cut_chunk(self.writer, event)
            return False
        if event is not None:
            self.left = None if self.left is None else self.left - 1
            await chunk(self.writer, event)
        return True

    async def bookmark(self) -> None:
        if self.request.query.get("allowWatchBookmarks") in ("1", "true"):
            meta = {"resourceVersion": str(self.since)}
            await chunk(self.writer, {"type": "BOOKMARK", "object": {"metadata": meta}})

    async def refuse(self, oldest: int) -> None:
        refused = Refused(410, f"too old resource version: {self.since} ({oldest})")
        await chunk(self.writer, {"type": "ERROR", "object": refused.status()})


@dataclass(eq=False)
class ApiServer:
    """`tokens` are the users by bearer token, `rules` the permissions of each user; without rules, everything
    is permitted. `asked` lists every request that RBAC allowed or refused. A watch lasts at most
    `most_watch_s`. `logs` are those of pods, by name."""

    host: str = "127.0.0.1"
    port: int = 0
    tokens: dict[str, str] = field(
        default_factory=lambda: {"token-1": "system:serviceaccount:default:router"}
    )
    rules: dict[str, tuple[Rule, ...]] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    asked: list[Request] = field(default_factory=list)
    ca: bytes = b""
    version: int = 100
    context: ssl.SSLContext | None = None
    listening: asyncio.Server | None = None
    most_watch_s: float = 300.0
    logs: dict[str, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._objects: dict[tuple[str, str], Object] = {}
        self._history: list[_Change] = []
        self._oldest = self.version
        self._pages: dict[str, tuple[int, list[Object]]] = {}
        self._numbers = itertools.count(1)
        self._changed = asyncio.Event()
        self._bookmarks = 0
        self._connections: dict[asyncio.StreamWriter, asyncio.Task[Any]] = {}

    # -- in process ------------------------------------------------------------------------------

    def put(self, collection: str, value: Object, *, silently: bool = False) -> Object:
        """Create or replace an object; `silently` sends no event to watches."""
        made = self._change(collection, value, (collection, value["metadata"]["name"]) in self._objects)
        if silently:
            self._history.pop()
        return made

    def delete(self, collection: str, name: str) -> Object:
        """Delete an object and return its last state. Raise KeyError."""
        before = self._objects.pop((collection, name))
        self.version += 1
        gone = copy.deepcopy(before)
        gone["metadata"]["resourceVersion"] = str(self.version)
        self._record(_Change(self.version, "DELETED", collection, gone, before))
        return gone

    def expire(self) -> None:
        """Expire every version but the latest, and all paginated lists."""
        self._history.clear()
        self._pages.clear()
        self._oldest = self.version

    def bookmark(self) -> None:
        """Send a bookmark to every watch that requested bookmarks."""
        self._bookmarks += 1
        self._tell()

    def cut(self) -> None:
        """Cut every connection."""
        for writer in self._connections:
            writer.transport.abort()

    def write_credentials(self, folder: Path, token: str = "token-1", namespace: str = "default") -> Path:
        """Write a service account's folder, as the kubelet mounts it."""
        folder.mkdir(exist_ok=True)
        for name, value in (
            ("token", token.encode()),
            ("ca.crt", self.ca),
            ("namespace", namespace.encode()),
        ):
            (folder / f".{name}").write_bytes(value)
            (folder / f".{name}").replace(folder / name)
        return folder

    def environment(self) -> dict[str, str]:
        """The environment of every container of the cluster."""
        return {"KUBERNETES_SERVICE_HOST": self.host, "KUBERNETES_SERVICE_PORT": str(self.port)}

    async def until(self, seen: Callable[[], bool]) -> None:
        """Wait for requests or changes until `seen` is true."""
        while not seen():
            await self._changed.wait()

    def verbs(self) -> list[str]:
        """The verbs of all requests."""
        return [request.verb for request in self.asked]

    # -- requests --------------------------------------------------------------------------------

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a new connection."""
        self._connections[writer] = asyncio.create_task(self._serve(reader, writer))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._exchange(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError, ssl.SSLError):
            pass
        finally:
            del self._connections[writer]
            writer.transport.abort()

    async def listen(self) -> None:
        """Listen, at the same port as before."""
        self.listening = await asyncio.start_server(self.accept, self.host, self.port, ssl=self.context)
        self.port = self.listening.sockets[0].getsockname()[1]

    def stop(self) -> None:
        """Stop listening, and close all connections."""
        if self.listening is not None:
            self.listening.close()
        self.cut()
        for task in self._connections.values():
            task.cancel()

    async def ended(self) -> None:
        """Wait until no connection is served."""
        await asyncio.gather(*self._connections.values(), return_exceptions=True)

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("ascii")
        line, *fields = head.split("\r\n")
        method, target, _ = line.split(" ")
        headers = {name.lower(): value.strip() for name, _, value in (each.partition(":") for each in fields)}
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        try:
            request = self._admit(method, target, headers, body)
            fault = self._fault(request.verb)
            if fault.mute and request.verb != "watch":
                await asyncio.Event().wait()
            if fault.status:
                raise Refused(fault.status, f"made to fail: {fault.status}", fault.retry_after)
            if request.verb == "watch":
                await self._watch(request, writer, fault)
                return False
            if request.resource == "pods/log" and request.name in self.logs:
                await send_text(writer, self.logs[request.name])
                return False
            code, answer = self._answer(request)
        except Refused as refused:
            await send(writer, refused.code, refused.status(), refused.retry_after)
        else:
            await send(writer, code, answer)
        return headers.get("connection") != "close"

    def _admit(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> Request:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        user = self.tokens.get(token) if scheme == "Bearer" else None
        if user is None:
            raise Refused(401, "Unauthorized")
        request = Request.read(method, target, user, body)
        self.asked.append(request)
        self._tell()
        if user in self.rules and not any(rule.allows(request) for rule in self.rules[user]):
            raise request.forbidden()
        return request

    def _fault(self, verb: str) -> Fault:
        for fault in self.faults:
            if fault.verb == verb:
                fault.times -= 1
                if not fault.times:
                    self.faults.remove(fault)
                return fault
        return Fault(verb)

    def _answer(self, request: Request) -> tuple[int, Object]:
        key = (request.collection, request.name)
        if request.verb == "list":
            return 200, self._list(request)
        if request.verb == "create":
            value = json.loads(request.body)
            if (request.collection, value["metadata"]["name"]) in self._objects:
                raise Refused(409, f'{request.resource} "{value["metadata"]["name"]}" already exists')
            return 201, self._change(request.collection, value, False)
        if request.verb == "deletecollection" or key not in self._objects:
            raise Refused(404, f'{request.resource} "{request.name}" not found')
        before = self._objects[key]
        if request.verb == "delete":
            held = deleting(before, request.body)
            return 200, self.delete(*key) if held is None else self._change(request.collection, held, True)
        if request.verb == "get":
            return 200, before
        given = json.loads(request.body)
        value = merged(before, given) if request.verb == "patch" else given
        stale = given.get("metadata", {}).get("resourceVersion", before["metadata"]["resourceVersion"])
        if stale != before["metadata"]["resourceVersion"]:
            raise Refused(
                409,
                f'Operation cannot be fulfilled on {request.resource} "{request.name}": the object has been '
                "modified; please apply your changes to the latest version and try again",
            )
        changed = self._change(request.collection, value, True)
        return 200, self.delete(*key) if released(changed) else changed

    def _list(self, request: Request) -> Object:
        limit = int(request.query.get("limit", "0")) or len(self._objects) + 1
        if (token := request.query.get("continue")) is not None:
            if token not in self._pages:
                raise Refused(410, "The provided continue parameter is too old to display a consistent list")
            version, left = self._pages[token]
        else:
            version, left = self.version, self._selected(request)
        meta: Object = {"resourceVersion": str(version)}
        if len(left) > limit:
            meta |= {"continue": f"page-{next(self._numbers)}", "remainingItemCount": len(left) - limit}
            self._pages[meta["continue"]] = (version, left[limit:])
        return {"kind": "List", "apiVersion": "v1", "metadata": meta, "items": left[:limit]}

    def _selected(self, request: Request) -> list[Object]:
        found = (each for (where, _), each in sorted(self._objects.items()) if request.covers(where))
        return [each for each in found if request.selects(each)]

    # -- watches ---------------------------------------------------------------------------------

    async def _watch(self, request: Request, writer: asyncio.StreamWriter, fault: Fault) -> None:
        head = b"content-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
        writer.write(b"HTTP/1.1 200 OK\r\n" + head)
        await writer.drain()
        if fault.mute:
            await asyncio.Event().wait()
        watch = _Watch(request, writer, fault.cut_after, int(request.query.get("resourceVersion") or "0"))
        try:
            async with asyncio.timeout(
                min(self.most_watch_s, float(request.query.get("timeoutSeconds", "300")))
            ):
                if fault.gone or 0 < watch.since < self._oldest:
                    await watch.refuse(self._oldest)
                elif not await self._follow(watch):
                    return
        except TimeoutError:
            await watch.bookmark()
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    async def _follow(self, watch: _Watch) -> bool:
        """Whether the watch ended normally, and was not cut."""
        if not watch.since:
            there, watch.since = self._selected(watch.request), self.version
            for value in there:
                await chunk(watch.writer, {"type": "ADDED", "object": value})
        bookmarks = self._bookmarks
        while watch.since >= self._oldest:
            changed = self._changed
            for change in [each for each in self._history if each.version > watch.since]:
                if not await watch.tell(change):
                    return False
            if bookmarks != self._bookmarks:
                await watch.bookmark()
            bookmarks = self._bookmarks
            await changed.wait()
        await watch.refuse(self._oldest)
        return True

    def _change(self, collection: str, value: Object, there: bool) -> Object:
        self.version += 1
        made = copy.deepcopy(value)
        before = self._objects.get((collection, made["metadata"]["name"]))
        made["metadata"]["resourceVersion"] = str(self.version)
        made["metadata"].setdefault("uid", f"uid-{next(self._numbers)}")
        self._objects[(collection, made["metadata"]["name"])] = made
        self._record(_Change(self.version, "MODIFIED" if there else "ADDED", collection, made, before))
        return made

    def _record(self, change: _Change) -> None:
        self._history.append(change)
        self._tell()

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def _event_line(request: Request, change: _Change) -> Object | None:
    """A change as this watch sees it: an object that it does not select any more is deleted for it."""
    if not request.covers(change.collection):
        return None
    was = change.before is not None and request.selects(change.before)
    if change.kind == "DELETED" or not request.selects(change.value):
        return {"type": "DELETED", "object": change.value} if was else None
    return {"type": "MODIFIED" if was else "ADDED", "object": change.value}


async def start_server(folder: Path, host: str = "127.0.0.1", made: ApiServer | None = None) -> ApiServer:
    """A server on a free port, which writes its key to `folder`. End it with `stop`."""
    made = made or ApiServer(host)
    made.ca, served = certificate_for(host)
    (folder / "api-server.pem").write_bytes(served)
    made.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.context.load_cert_chain(folder / "api-server.pem")
    await made.listen()
    return made


@asynccontextmanager
async def api_server(
    folder: Path, host: str = "127.0.0.1", made: ApiServer | None = None
) -> AsyncIterator[ApiServer]:
    """The same as a context manager."""
    made = await start_server(folder, host, made)
    try:
        yield made
    finally:
        made.stop()
        await made.ended()
