"""The key of one engine over several nodes, with which the kernel signs the connections between its ranks.

What vLLM opens for them (torch's store, gloo's pairs, ZeroMQ's queues) asks for nothing, and part of it is
read with pickle. None of these libraries can be given a key, so that signed_tcp.c sets it on their sockets.
It is made for one start of an engine, by its first node, and reaches the others with their place in the
engine.
"""

from __future__ import annotations

import ctypes
import secrets
import socket
import struct
from collections.abc import Mapping
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

KEY_VARIABLE = "KVASIR_ENGINE_KEY"
PRELOAD_VARIABLE = "LD_PRELOAD"
LIBRARY = Path(__file__).with_name(f"_signed_tcp{EXTENSION_SUFFIXES[0]}")
ACCEPT = (
    "where nobody else reaches the network between the nodes, accept it with "
    "engine.unauthenticated_rendezvous: true"
)

_KEY_BYTES = 32
_TCP_MD5SIG_EXT = 32
"""A socket option of linux/tcp.h, with `struct tcp_md5sig`."""
_SIGNATURE = struct.Struct("=H126sBBHi80s")
_PREFIX = 1


def make_key() -> str:
    """Return a new random key, of 64 hexadecimal digits; Linux takes at most 80 bytes."""
    return secrets.token_hex(_KEY_BYTES)


def signing_variables(key: str, environ: Mapping[str, str], library: Path = LIBRARY) -> dict[str, str]:
    """Return the variables of a process whose children sign with `key`; {} without one."""
    if not key:
        return {}
    others = [name for name in environ.get(PRELOAD_VARIABLE, "").split(":") if name and name != str(library)]
    return {
        KEY_VARIABLE: key,
        PRELOAD_VARIABLE: ":".join([str(library), *others]),
        # A child that is forked would go on without the library.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }


def cannot_sign(library: Path = LIBRARY) -> tuple[str, str] | None:
    """Return why connections cannot be signed on this machine, and what to do; None if they can."""
    if not library.exists():
        return (
            "Kvasir was installed without a C compiler",
            f"install one (`apt install g++`) and reinstall; or, {ACCEPT}",
        )
    every = _SIGNATURE.pack(socket.AF_INET, b"", _PREFIX, 0, 1, 0, b"k")
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.IPPROTO_TCP, _TCP_MD5SIG_EXT, every)
    except OSError as error:
        return (
            f"the kernel signs no TCP connections ({error.strerror})",
            f"use one with CONFIG_TCP_MD5SIG that is not in FIPS mode; or, {ACCEPT}",
        )
    return None


def is_loaded() -> bool:
    """Return whether this process was started with the library."""
    return hasattr(ctypes.CDLL(None), "kvasir_signs_sockets")
