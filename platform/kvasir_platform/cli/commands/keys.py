"""`kvasir keys`: creates API keys for clients, and the lines that gateways store."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

from kvasir.core.errors import ConfigError
from kvasir_platform.cli.common.output import CommandOutput
from kvasir_platform.gateway.tenants.keys import key_line, new_key

_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_MAX_DAYS = 36_500


def keys_new(tenant: str, days: int | None, output: CommandOutput, now: datetime) -> int:
    """Print a new key. Raises ConfigError for an invalid tenant or duration."""
    if not _NAME.fullmatch(tenant) or len(tenant) > 40:
        raise ConfigError(f"--tenant {tenant[:64]!r}: expected lower-case letters, digits and -, 40 at most")
    if days is not None and not 1 <= days <= _MAX_DAYS:
        raise ConfigError(f"--days {days}: expected 1 to {_MAX_DAYS}")
    key = new_key()
    line = key_line(key, tenant, None if days is None else now.astimezone(UTC) + timedelta(days=days))
    output.text(f"key   {key}")
    output.text(f"line  {line}")
    output.text()
    output.text("Give the key to the client: it is shown this once. Put the line into what")
    output.text("gateway.api_keys_file, api_keys_dir or api_keys_env names.")
    output.data({"key": key, "line": line})
    return 0
