"""What the in-test API server writes to a connection, and its certificate."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import json

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID
from tests.kit.gateway.api_requests import REASONS, Object


async def send(
    writer: asyncio.StreamWriter, code: int, answer: Object, retry_after: int | None = None
) -> None:
    body = json.dumps(answer).encode()
    more = b"" if retry_after is None else b"retry-after: %d\r\n" % retry_after
    writer.write(
        b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\n%bcontent-length: %d\r\n\r\n%b"
        % (code, REASONS.get(code, "OK").encode(), more, len(body), body)
    )
    await writer.drain()


async def send_text(writer: asyncio.StreamWriter, text: bytes) -> None:
    """Send a log: a text that ends with the connection."""
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\nconnection: close\r\n\r\n" + text)
    await writer.drain()


async def chunk(writer: asyncio.StreamWriter, event: Object) -> None:
    line = json.dumps(event).encode() + b"\n"
    writer.write(b"%x\r\n%b\r\n" % (len(line), line))
    await writer.drain()


async def cut_chunk(writer: asyncio.StreamWriter, event: Object) -> None:
    line = json.dumps(event).encode()
    writer.write(b"%x\r\n%b" % (len(line), line[:20]))
    await writer.drain()


def certificate_for(host: str) -> tuple[bytes, bytes]:
    """PEM of an authority, and of a key with its certificate for the address `host`."""
    since = datetime.datetime.now(datetime.UTC) - datetime.timedelta(minutes=5)
    keys = [ec.generate_private_key(ec.SECP256R1()) for _ in range(2)]
    made = []
    for number, (key, common) in enumerate(zip(keys, ("kubernetes", "kube-apiserver"), strict=True)):
        builder = (
            x509.CertificateBuilder()
            .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kubernetes")]))
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)]))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(since)
            .not_valid_after(since + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=not number, path_length=None), critical=True)
        )
        if number:
            names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(host))])
            builder = builder.add_extension(names, critical=False)
        made.append(builder.sign(keys[0], SHA256()).public_bytes(Encoding.PEM))
    return made[0], keys[1].private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()) + made[1]
