"""An API server, and what a pod reaches it with."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from tests.kit.cluster.api_server import ApiServer, api_server

from kvasir_platform.cluster.kubernetes.access import Access


@pytest_asyncio.fixture
async def server(tmp_path: Path) -> AsyncIterator[ApiServer]:
    async with api_server(tmp_path) as made:
        yield made


@pytest.fixture
def access(server: ApiServer, tmp_path: Path) -> Access:
    return Access(server.host, server.port, server.write_credentials(tmp_path / "account"))
