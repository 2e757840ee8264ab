"""Network namespaces: a process behind its own link, which can be taken down like a cable.

A proxy cannot drop packets, but a link that is down does, and the kernel then behaves as in a real partition:
retransmission, failed address resolution, hanging connections. Needs root and iproute2.
"""

from __future__ import annotations

import asyncio
import ipaddress
import itertools
import os
from collections.abc import Sequence
from typing import Self

from tests.kit.programs import missing

from kvasir.core.errors import ConfigError

_BENCHMARK_NET = ipaddress.ip_network("198.18.0.0/15")
"""Reserved for tests of network devices (RFC 2544), so it collides with no real network."""
_LINKS = 16
_serial = itertools.count()


class NetnsUnavailable(ConfigError):
    """Namespaces cannot be created here."""


def available() -> str | None:
    """None if namespaces can be created here, otherwise what is missing."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    return missing("ip")


class Namespace:
    """A namespace with one link to the host's. Use as `async with`; it is deleted afterwards.

    `address` is the inside's address, `host_address` the host's, on the device `host_end`. Names and
    addresses are unique to this process.
    """

    def __init__(self) -> None:
        number = next(_serial)
        self.name = f"kvasir-{os.getpid()}-{number}"
        self.host_end = f"kv{os.getpid()}h{number}"
        slot = (os.getpid() * _LINKS + number % _LINKS) % (_BENCHMARK_NET.num_addresses // 4)
        first = int(_BENCHMARK_NET.network_address) + 4 * slot
        self.host_address = str(ipaddress.ip_address(first + 1))
        self.address = str(ipaddress.ip_address(first + 2))

    async def __aenter__(self) -> Self:
        if (missing := available()) is not None:
            raise NetnsUnavailable(missing)
        try:
            await self._make()
        except BaseException:
            await self.remove()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.remove()

    def command(self, argv: Sequence[str]) -> list[str]:
        """`argv` as a command that runs inside; the process keeps the command's pid."""
        return ["ip", "netns", "exec", self.name, *argv]

    async def down(self) -> None:
        """Take the link down. Packets of both sides are dropped until `up`."""
        await self._inside("link", "set", "eth0", "down")
        await self._expect(up=False)

    async def up(self) -> None:
        """Take the link up again."""
        await self._inside("link", "set", "eth0", "up")
        await self._expect(up=True)

    async def is_up(self) -> bool:
        """The state of the link according to the kernel."""
        return ",UP" in await self._inside("-o", "link", "show", "eth0")

    async def remove(self) -> None:
        """Delete the namespace, and with it both ends of the link. Idempotent."""
        await _ip("netns", "del", self.name, check=False)
        # If the far end was not moved inside, the pair still exists here.
        await _ip("link", "del", self.host_end, check=False)

    async def _make(self) -> None:
        await _ip("netns", "add", self.name)
        await _ip("link", "add", self.host_end, "type", "veth", "peer", "name", "eth0", "netns", self.name)
        await _ip("addr", "add", f"{self.host_address}/30", "dev", self.host_end)
        await _ip("link", "set", self.host_end, "up")
        await self._inside("addr", "add", f"{self.address}/30", "dev", "eth0")
        await self._inside("link", "set", "lo", "up")
        await self._inside("link", "set", "eth0", "up")

    async def _inside(self, *arguments: str) -> str:
        return await _ip("-n", self.name, *arguments)

    async def _expect(self, *, up: bool) -> None:
        if await self.is_up() is not up:
            raise RuntimeError(f"the link of {self.name} did not go {'up' if up else 'down'}")


async def _ip(*arguments: str, check: bool = True) -> str:
    process = await asyncio.create_subprocess_exec(
        "ip", *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    output, errors = await process.communicate()
    if check and process.returncode:
        said = errors.decode(errors="replace").strip()
        raise NetnsUnavailable(f"`ip {' '.join(arguments)}` failed: {said}")
    return output.decode(errors="replace")
