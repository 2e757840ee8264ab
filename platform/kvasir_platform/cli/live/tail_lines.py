"""Which ended requests `kvasir tail` shows, and how: pure."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from kvasir_platform.cli.common.output import milliseconds

Row = dict[str, Any]
"""A record of a recording (docs/RECORDING.md), with `request_id`."""
_NOT_FAILED = ("ok", "client_closed", "content_filter")
HEAD = (
    f"{'TIME':<12}  {'OUTCOME':<14}  {'TENANT':<12}  {'MODEL':<16}  {'TOOK':>10}  {'TTFT':>10}  {'ITL':>9}  "
    f"{'IN':>7}  {'CACHED':>7}  {'OUT':>6}  REQUEST"
)


@dataclass(frozen=True, slots=True)
class TailFilter:
    """What is shown. `slow_s`: those that took longer, 0 for those that missed their SLO class, None without
    that condition. With `failed` too, either is enough."""

    tenant: str | None = None
    model: str | None = None
    slow_s: float | None = None
    failed: bool = False

    def shows(self, row: Row) -> bool:
        """Whether a request is shown."""
        if self.tenant is not None and row.get("tenant", "") != self.tenant:
            return False
        if self.model is not None and row["model"] != self.model:
            return False
        if self.slow_s is None and not self.failed:
            return True
        outcome = row["outcome"]
        return (self.failed and outcome["code"] not in _NOT_FAILED) or self._is_slow(outcome)

    def _is_slow(self, outcome: dict[str, Any]) -> bool:
        if self.slow_s is None:
            return False
        if self.slow_s == 0.0:
            return outcome["code"] == "ok" and outcome["slo_met"] is False
        return bool(outcome["e2e_s"] > self.slow_s)


def tail_line(row: Row, ended: datetime) -> str:
    """Return the line of a request that ended at that time."""
    outcome = row["outcome"]
    missed = "!" if outcome["slo_met"] is False and outcome["code"] == "ok" else ""
    return (
        f"{ended:%H:%M:%S}.{ended.microsecond // 1000:03d}  {outcome['code'] + missed:<14}  "
        f"{row.get('tenant') or '-':<12}  {row['model']:<16}  {milliseconds(outcome['e2e_s']):>10}  "
        f"{milliseconds(outcome['ttft_s']):>10}  {milliseconds(outcome['itl_s']):>9}  "
        f"{row['prompt_tokens']:>7,}  {outcome['cached_tokens']:>7,}  {outcome['output_tokens']:>6,}  "
        f"{row.get('request_id', '-')}"
    )
