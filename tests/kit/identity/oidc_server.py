"""An OpenID Connect provider on loopback: a discovery document, rotating signing keys, and tokens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from jwt.algorithms import get_default_algorithms

AUDIENCE = "kvasir"
DISCOVERY = "/.well-known/openid-configuration"
JWKS = "/keys"


@cache
def private_key(algorithm: str, name: str) -> Any:
    """The key of this name; RSA keys take long to make."""
    del name
    return (
        rsa.generate_private_key(65537, 2048)
        if algorithm.startswith(("RS", "PS"))
        else ec.generate_private_key(ec.SECP256R1())
    )


def public_jwk(algorithm: str, kid: str) -> dict[str, Any]:
    """The published form of a key."""
    made = json.loads(get_default_algorithms()[algorithm].to_jwk(private_key(algorithm, kid).public_key()))
    return {**made, "kid": kid, "use": "sig", "alg": algorithm}


@dataclass
class OidcServer:
    """Its keys by id, and what was asked of it. `replies` replaces answers by path: a status and a body, or
    bytes that are no HTTP. While `gate` is clear it does not answer."""

    port: int = 0
    keys: dict[str, str] = field(default_factory=lambda: {"first": "ES256"})
    asked: list[str] = field(default_factory=list)
    replies: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    gate: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def issuer(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def rotate(self, kid: str, algorithm: str = "ES256") -> None:
        """Sign with a new key, and publish no other."""
        self.keys = {kid: algorithm}

    def token(self, claims: dict[str, Any] | None = None, *, kid: str | None = None, **header: Any) -> str:
        """A token that the key `kid`, by default the newest, has signed."""
        kid = list(self.keys)[-1] if kid is None else kid
        algorithm = self.keys.get(kid, "ES256")
        said = {"iss": self.issuer, "aud": AUDIENCE, "sub": "someone"} | (claims or {})
        return jwt.PyJWS().encode(
            json.dumps(said).encode(),
            private_key(algorithm, kid),
            algorithm=algorithm,
            headers={"kid": kid, **header},
        )

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            path = head.split(" ")[1]
            self.asked.append(path)
            await self.gate.wait()
            status, body = self.replies.get(path, (200, self._page(path)))
            writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body))
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def _page(self, path: str) -> bytes:
        if path == DISCOVERY:
            return json.dumps({"issuer": self.issuer, "jwks_uri": self.issuer + JWKS}).encode()
        return json.dumps({"keys": [public_jwk(alg, kid) for kid, alg in self.keys.items()]}).encode()


@asynccontextmanager
async def oidc_server() -> AsyncIterator[OidcServer]:
    """A provider on a free port of loopback."""
    made = OidcServer()
    made.gate.set()
    listening = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.port = listening.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        made.gate.set()
        listening.close()
        await listening.wait_closed()
