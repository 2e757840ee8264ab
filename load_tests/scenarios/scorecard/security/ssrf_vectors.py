"""Vectors of server-side request forgery: URLs of a service to call, and requests that carry URLs. Each leads
to a trap that a client that follows it connects to, to the metadata service of a cloud, or to a file."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

METADATA = "http://169.254.169.254/latest/meta-data/iam/"


@dataclass(frozen=True, slots=True)
class Lure:
    """A URL with `{port}` for the trap's port. Its name resolves to `addresses`. `reaches`: a client that
    follows the URL connects to the trap, so a system that does not connect is protected by more than the
    spelling."""

    name: str
    url: str
    addresses: tuple[str, ...] = ()
    reaches: bool = True


LURES = (
    Lure("loopback", "http://127.0.0.1:{port}/"),
    Lure("another address of loopback", "http://127.1.2.3:{port}/", reaches=False),
    Lure("two numbers", "http://127.1:{port}/"),
    Lure("one number", "http://2130706433:{port}/"),
    Lure("one hexadecimal number", "http://0x7f000001:{port}/"),
    Lure("hexadecimal numbers", "http://0x7f.0x0.0x0.0x1:{port}/"),
    Lure("octal numbers", "http://0177.0.0.01:{port}/"),
    Lure("nobody's address", "http://0.0.0.0:{port}/"),
    Lure("zero", "http://0:{port}/"),
    Lure("loopback of IPv6", "http://[::1]:{port}/"),
    Lure("loopback of IPv6 in full", "http://[0:0:0:0:0:0:0:1]:{port}/"),
    Lure("nobody's address of IPv6", "http://[::]:{port}/"),
    Lure("mapped into IPv6", "http://[::ffff:127.0.0.1]:{port}/"),
    Lure("mapped into IPv6, hexadecimal", "http://[::ffff:7f00:1]:{port}/"),
    Lure("compatible with IPv4", "http://[::127.0.0.1]:{port}/", reaches=False),
    Lure("translated by NAT64", "http://[64:ff9b::127.0.0.1]:{port}/", reaches=False),
    Lure("tunnelled by 6to4", "http://[2002:7f00:1::]:{port}/", reaches=False),
    Lure("tunnelled by Teredo", "http://[2001:0:7f00:1::]:{port}/", reaches=False),
    Lure("localhost", "http://localhost:{port}/"),
    Lure("localhost in capitals", "http://LOCALHOST:{port}/"),
    Lure("user information", "http://example.com@127.0.0.1:{port}/"),
    Lure("user information and a port", "http://example.com:80@127.0.0.1:{port}/"),
    Lure("full-width digits", "http://\uff11\uff12\uff17.0.0.1:{port}/", reaches=False),
    Lure("a percent-encoded address", "http://%31%32%37.0.0.1:{port}/", reaches=False),
    Lure("a dot at the end", "http://127.0.0.1.:{port}/", reaches=False),
    Lure("a name of loopback", "http://a.example.com:{port}/", ("127.0.0.1",)),
    Lure("a name of loopback of IPv6", "http://b.example.com:{port}/", ("::1",)),
    Lure("a name of a mapped address", "http://c.example.com:{port}/", ("::ffff:127.0.0.1",)),
    Lure("a name of nobody's address", "http://d.example.com:{port}/", ("0.0.0.0",)),
    Lure("a public name with loopback among its addresses", "http://e.example.com:{port}/",
         ("127.0.0.1", "93.184.216.34")),
    Lure("a name of metadata", "http://f.example.com:{port}/", ("169.254.169.254",), reaches=False),
    Lure("a name of a private network", "http://g.example.com:{port}/", ("10.0.0.1",), reaches=False),
    Lure("a name of metadata beside a public address", "http://h.example.com/",
         ("93.184.216.34", "fd00:ec2::254"), reaches=False),
    Lure("metadata", METADATA, reaches=False),
    Lure("metadata as one number", "http://2852039166/", reaches=False),
    Lure("metadata by its name", "http://metadata.google.internal/", reaches=False),
    Lure("a file", "file:///etc/hostname", reaches=False),
    Lure("gopher", "gopher://127.0.0.1:{port}/_x", reaches=False),
    Lure("dict", "dict://127.0.0.1:{port}/x", reaches=False),
    Lure("a socket of the machine", "unix:///run/docker.sock", reaches=False),
    Lure("a line break", "http://127.0.0.1:{port}/\r\nx: y", reaches=False),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sent:
    """A request to the gateway that carries a URL. `refused`: it must be answered with 4xx or 501, and with
    one of `codes` if given. Otherwise the URL is ordinary text."""

    name: str
    start: str
    body: Any = None
    headers: str = ""
    refused: bool = True
    codes: tuple[str, ...] = ()

    def data(self, address: str) -> bytes:
        """The request as bytes for the gateway at `address`."""
        body = b"" if self.body is None else json.dumps(self.body).encode()
        host = "" if "host:" in self.headers.lower() else f"Host: {address}\r\n"
        length = f"Content-Length: {len(body)}\r\n" if self.body is not None else ""
        return f"{self.start} HTTP/1.1\r\n{host}{self.headers}{length}\r\n".encode() + body


def requests(trap: Callable[[str], str], file: str) -> list[Sent]:
    """Vectors that the gateway handles. `trap` makes a URL at a host that leads into the trap, `file` names a
    file."""
    url = trap("127.0.0.1")
    return [*_media(trap, file), *_fields(url, file), *_heads(url), *_workers(url)]


def _media(trap: Callable[[str], str], file: str) -> list[Sent]:
    url = trap("127.0.0.1")
    hosts = ("127.0.0.1", "localhost", "[::1]", "2130706433", "0x7f.1", "[::ffff:7f00:1]")
    pictures = [(f"a picture at {host}", trap(host)) for host in hosts]
    pictures += [
        ("a picture of metadata", METADATA),
        ("a picture in a file", file),
        ("a picture of user information", url.replace("//", "//example.com@")),
    ]
    parts: list[tuple[str, dict[str, Any]]] = [
        (name, {"type": "image_url", "image_url": {"url": at}}) for name, at in pictures
    ]
    parts += [
        ("audio", {"type": "audio_url", "audio_url": {"url": url}}),
        ("audio given inline", {"type": "input_audio", "input_audio": {"data": url, "format": "wav"}}),
        ("video", {"type": "video_url", "video_url": {"url": url}}),
        ("a document", {"type": "file", "file": {"file_id": url, "file_data": url}}),
    ]
    found = [_chat(name, {}, [part], ("unsupported_modality",)) for name, part in parts]
    others: list[tuple[str, dict[str, Any]]] = [
        ("a picture without an object", {"type": "image_url", "image_url": url}),
        ("a picture as of other services", {"type": "input_image", "image_url": url}),
        ("a document by its URL", {"type": "input_file", "file_url": url}),
    ]
    return found + [_chat(name, {}, [part]) for name, part in others]


def _fields(url: str, file: str) -> list[Sent]:
    include = '{% include "' + url + '" %}'
    read = '{{ "" | attr("__class__") }}{% import "' + file + '" as x %}{{ x }}'
    beside = {"type": "text", "text": "x", "image_url": {"url": url}}
    host, _, port = url.removeprefix("http://").rpartition("/")[0].partition(":")
    other_host = {
        "remote_host": host,
        "remote_port": int(port),
        "remote_engine_id": "e",
        "do_remote_prefill": True,
    }
    return [
        _chat("a model at a URL", {"model": url}, codes=("model_not_found",)),
        _chat("a model in a file", {"model": file}, codes=("model_not_found",)),
        _chat("KV of another server's", {"kv_transfer_params": other_host}),
        _chat("encodings of another server's", {"ec_transfer_params": other_host}),
        _chat("how to read media", {"media_io_kwargs": {"image": {"url": url}}}),
        _chat("encoded media", {"mm_payload": {"image": url}}),
        _chat("a search of the web", {"web_search_options": {"endpoint": url}}),
        _chat("a template that includes a URL", {"chat_template": include}),
        _chat("a template that imports a file", {"chat_template": read}),
        _chat("where to call back", {"callback_url": url}),
        _chat("an argument of the engine's", {"vllm_xargs": {"url": url}}),
        _chat("a tool of another server's", {"tools": [{"type": "mcp", "server_url": url}]}),
        _chat("a session named by a URL", {"user": url, "metadata": {"url": url}}, refused=False),
        _chat("a picture beside a text", {}, [beside]),
        _completion("a prompt that is a URL", {"prompt": url}, refused=False),
        _completion("embeddings as a prompt", {"prompt_embeds": url}),
        Sent("an embedding of what is at a URL", "POST /v1/embeddings",
             {"model": "kvasir-tiny", "input": [{"image_url": url}]}),
        Sent("tokens of a URL", "POST /tokenize", {"model": "kvasir-tiny", "prompt": url}, refused=False),
    ]  # fmt: skip


def schema_requests(url: str, file: str) -> list[Sent]:
    """Vectors for an engine that compiles schemas. It may return any error for a reference that the schema
    does not contain, but it must not fetch the reference."""
    found = []
    for where, ref in (("a URL", f"{url}/schema.json"), ("a file", file)):
        schema = {"type": "object", "properties": {"a": {"$ref": ref}}, "required": ["a"]}
        named = {"name": "s", "schema": schema}
        tag = {
            "type": "structural_tag",
            "structures": [{"begin": "<a>", "end": "</a>", "schema": schema}],
            "triggers": ["<a>"],
        }
        tool = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
        shape = {"type": "json_schema", "json_schema": named}
        forced = {"tools": [tool], "tool_choice": "required"}
        grammar = f"%import {ref}\nstart: X\n"
        found += [
            _chat(f"a format that refers to {where}", {"response_format": shape}),
            _chat(f"a schema that refers to {where}", {"structured_outputs": {"json": schema}}),
            _chat(f"a guide that refers to {where}", {"guided_json": schema}),
            _chat(f"a tag that refers to {where}", {"response_format": tag}),
            _chat(f"a forced tool that refers to {where}", forced),
            _chat(f"a grammar that imports {where}", {"guided_grammar": grammar}),
        ]
    base = {"$schema": url, "$id": url, "type": "object", "properties": {"a": {"$dynamicRef": "other#a"}}}
    return [*found, _chat("a schema that is named by a URL", {"guided_json": base}, refused=False)]


def _heads(url: str) -> list[Sent]:
    authority = url.removeprefix("http://").partition("/")[0]
    names = ("X-Forwarded-Host", "X-Original-URL", "X-Rewrite-URL", "X-HTTP-DestinationURL", "Referer",
             "Origin", "Forwarded", "True-Client-IP", "X-Callback-URL", "baggage", "X-Worker-URL",
             "X-Gateway-Destination-Endpoint")  # fmt: skip
    headers = "".join(f"{name}: {url}\r\n" for name in names)
    return [
        Sent("a request as to a proxy", f"GET {url}"),
        Sent("a tunnel", f"CONNECT {authority}"),
        Sent("a request to another host", "GET /nothing", headers=f"Host: {authority}\r\n"),
        Sent("another protocol", "GET /nothing", headers="Connection: Upgrade\r\nUpgrade: h2c\r\n"),
        Sent("headers for routers and proxies", "GET /health/live", headers=headers, refused=False),
    ]


def _workers(url: str) -> list[Sent]:
    within = quote(url, safe="")
    return [
        Sent("a worker to add", f"POST /add_worker?url={within}", {}),
        Sent("a worker to list", "POST /workers", {"url": url, "pool": "both"}),
        Sent("a worker to register", "POST /register", {"address": url, "pool": "both"}),
        Sent("a worker to drain", f"POST /workers/{within}/drain", {}),
        Sent("an adapter to load", "POST /v1/load_lora_adapter", {"lora_name": "a", "lora_path": url}),
    ]


def _chat(
    name: str,
    fields: dict[str, Any],
    content: list[dict[str, Any]] | str = "x",
    codes: tuple[str, ...] = (),
    *,
    refused: bool = True,
) -> Sent:
    messages = [{"role": "user", "content": content}]
    body = {"model": "kvasir-tiny", "messages": messages, "max_tokens": 2} | fields
    return Sent(name, "POST /v1/chat/completions", body, refused=refused, codes=codes)


def _completion(name: str, fields: dict[str, Any], *, refused: bool = True) -> Sent:
    body = {"model": "kvasir-tiny", "prompt": "x", "max_tokens": 2} | fields
    return Sent(name, "POST /v1/completions", body, refused=refused)
