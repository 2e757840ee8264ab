"""What Ray Serve asks of a replica after its controller has restarted: the path of its log.

Serve's controller takes a replica that cannot answer for broken and replaces it, with the streams and the KV
of its engine. The answer is in the handlers that Serve made for the replica's process, so they have to
survive what else configures logging in that process.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPLICA = """
import asyncio, contextlib, json, logging, os, sys
from types import SimpleNamespace
import ray
from ray.serve._private.common import ServeComponentType
from ray.serve._private.logging_utils import configure_component_logger, get_component_logger_file_path
from ray.serve.schema import LoggingConfig

folder, told = sys.argv[1], os.dup(1)
# As ray.serve._private.replica does, before it makes the user's object.
configure_component_logger(
    component_name="kvasir-decode_decode",
    component_id="replica",
    component_type=ServeComponentType.REPLICA,
    logging_config=LoggingConfig(logs_dir=folder + "/serve"),
    max_bytes=1 << 20,
    backup_count=1,
)
ray._private.worker._global_node = SimpleNamespace(get_logs_dir_path=lambda: folder)

from kvasir_workers.pool.replica import PoolReplica

with contextlib.suppress(ValueError):
    # Its first act, whatever becomes of it.
    asyncio.run(PoolReplica.__init__(object.__new__(PoolReplica), None, None, "no spec", "decode", "token"))
"""
LIBRARY = """
import logging.config
logging.config.dictConfig({"version": 1, "disable_existing_loggers": False})
"""
VLLM = """
from kvasir_workers.engines.vllm.setup.engine_errors import EngineErrors
errors = EngineErrors("WARNING")
os.environ.update(errors.variables)
from vllm.config.logging import LoggingConfig as EngineLogging
from vllm.logger import configure_logging_if_needed
# As vLLM's front does before it starts the engine core, in this process.
configure_logging_if_needed(EngineLogging())
assert logging.getLogger("vllm").handlers, "vLLM has configured its own logger"
errors.close()
"""
ANSWER = """
path = get_component_logger_file_path()
logging.getLogger("ray.serve").error("still written")
os.write(told, json.dumps(path).encode())
"""


def answer(folder: Path, library: str) -> str:
    """Return the path that the replica's process answers after `library`'s code has run in it, and what its
    log has then."""
    run = subprocess.run(
        [sys.executable, "-c", REPLICA + library + ANSWER, str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    path: str = json.loads(run.stdout)
    return (folder / path.lstrip("/")).read_text()


def test_a_replica_knows_its_log_after_a_library_has_configured_logging(tmp_path: Path) -> None:
    assert "still written" in answer(tmp_path, LIBRARY)


@pytest.mark.slow
def test_a_replica_knows_its_log_after_vllm_has_configured_logging(tmp_path: Path) -> None:
    assert "still written" in answer(tmp_path, VLLM)
