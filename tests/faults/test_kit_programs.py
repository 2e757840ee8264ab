"""A missing program fails its users with a message that names the Debian package."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.kit.lab.netns import Namespace, NetnsUnavailable
from tests.kit.lab.redis_server import RedisServer
from tests.kit.programs import MissingProgramError, program

PACKAGES = {"redis-server": "redis-server", "haproxy": "haproxy", "ip": "iproute2"}


@pytest.mark.parametrize("name", PACKAGES)
def test_a_missing_program_is_an_error_that_names_the_package(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingProgramError, match=f"{name} is not installed: apt install {PACKAGES[name]}$"):
        program(name)
    stand_in = tmp_path / name
    stand_in.touch(mode=0o700)
    assert program(name) == str(stand_in)


async def test_what_starts_a_program_fails_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingProgramError, match="apt install redis-server"):
        RedisServer(tmp_path).start()
    monkeypatch.setattr("os.geteuid", lambda: 0)
    with pytest.raises(NetnsUnavailable, match="apt install iproute2"):
        await Namespace().__aenter__()
