"""Signatures of JSON Web Tokens and their keys: the only module that imports PyJWT.

PyJWT verifies signatures; times, issuer and audience are checked in `claims`, with the clock of the router.
Only keys of algorithms with a public key are ever loaded, and each key verifies only the algorithms that its
type and its own `alg` allow (RFC 8725, section 3.1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jwt
import msgspec
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

MAX_TOKEN_BYTES = 16 << 10
MAX_KEYS = 64
MIN_RSA_BITS = 2048
_KINDS: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"), ("RSA", "")),
    "ES256": ("EC", "P-256"),
    "ES384": ("EC", "P-384"),
    "ES512": ("EC", "P-521"),
    "EdDSA": ("OKP", "Ed25519"),
}
"""Type and curve of the keys of each algorithm."""
_UNCHECKED: Any = {
    "verify_signature": True,
    **dict.fromkeys(("verify_exp", "verify_nbf", "verify_iat", "verify_aud", "verify_iss"), False),
    **dict.fromkeys(("verify_sub", "verify_jti"), False),
}

KeyName = tuple[str, str]
"""The id of a key ("" for none) and an algorithm that it verifies."""


class TokenRefused(Exception):
    """The token is of no use. The message says why, and contains nothing of the token."""


class UnverifiedToken(NamedTuple):
    """What a token says of itself, for choosing its key; nothing of it is to be trusted."""

    key: KeyName
    issuer: str


class SigningKeys:
    """The keys of one provider that these algorithms can use."""

    def __init__(self, keys: Mapping[KeyName, jwt.PyJWK]) -> None:
        self._keys = keys

    def __len__(self) -> int:
        return len({kid for kid, _ in self._keys})

    def name_of(self, key: KeyName) -> KeyName | None:
        """Return the name of the key for a token that names it so, None if it is unknown. A token without a
        key id has the only key of its algorithm."""
        if key[0]:
            return key if key in self._keys else None
        fitting = [each for each in self._keys if each[1] == key[1]]
        return fitting[0] if len(fitting) == 1 else None

    def claims(self, token: bytes, key: KeyName) -> Mapping[str, Any]:
        """Return the claims of a token that this key has signed. Raise TokenRefused."""
        try:
            claims: Mapping[str, Any] = jwt.decode(
                token, self._keys[key], algorithms=[key[1]], options=_UNCHECKED
            )
        except jwt.PyJWTError as error:
            raise TokenRefused("its signature does not verify") from error
        return claims


def read_token(token: bytes) -> UnverifiedToken:
    """Return what a token says of itself. Raise TokenRefused if it is none."""
    if len(token) > MAX_TOKEN_BYTES:
        raise TokenRefused(f"it has more than {MAX_TOKEN_BYTES} bytes")
    try:
        parts = jwt.decode_complete(token, options={"verify_signature": False})
    except (jwt.PyJWTError, ValueError, RecursionError) as error:
        raise TokenRefused("it is no signed JSON Web Token") from error
    header, payload = parts["header"], parts["payload"]
    if "crit" in header:
        raise TokenRefused("its header has critical parameters")
    kid, algorithm, issuer = header.get("kid", ""), header.get("alg"), payload.get("iss")
    if not isinstance(kid, str) or not isinstance(algorithm, str) or not isinstance(issuer, str):
        raise TokenRefused("it names no algorithm or issuer")
    return UnverifiedToken((kid[:256], algorithm), issuer)


def read_keys(document: bytes, algorithms: Sequence[str]) -> SigningKeys:
    """Return the usable keys of a JSON Web Key Set (RFC 7517). Keys that are for something else, or that
    these algorithms cannot use, are left out, as providers publish them side by side. Raise ValueError if the
    document is none, has too many keys, or none that is of use."""
    try:
        listed = msgspec.json.decode(document, type=dict[str, Any]).get("keys")
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError("the signing keys are no JSON object") from error
    if not isinstance(listed, list) or len(listed) > MAX_KEYS:
        raise ValueError(f"the signing keys are no list of at most {MAX_KEYS} keys")
    keys: dict[KeyName, jwt.PyJWK] = {}
    for entry in listed:
        if isinstance(entry, dict) and entry.get("use", "sig") == "sig":
            for algorithm in algorithms:
                if (key := _key(entry, algorithm)) is not None:
                    kid = entry.get("kid", "")
                    keys[(kid[:256] if isinstance(kid, str) else "", algorithm)] = key
    if not keys:
        raise ValueError(f"none of the signing keys is of use for {', '.join(algorithms)}")
    return SigningKeys(keys)


def _key(entry: Mapping[str, Any], algorithm: str) -> jwt.PyJWK | None:
    kind, curve = _KINDS[algorithm]
    if entry.get("kty") != kind or (curve and entry.get("crv") != curve):
        return None
    if entry.get("alg", algorithm) != algorithm:
        return None
    try:
        key = jwt.PyJWK(dict(entry), algorithm)
    except (jwt.PyJWTError, ValueError, TypeError):
        return None
    if isinstance(key.key, RSAPublicKey) and key.key.key_size < MIN_RSA_BITS:
        return None
    # A private key that was published by mistake is in everybody's hands.
    return None if "d" in entry else key
