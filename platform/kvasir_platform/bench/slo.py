"""The SLO that a benchmark counts goodput by, and how a command line writes it: `ttft=500ms,itl=50ms`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from kvasir.core.errors import ConfigError

_TIME = re.compile(r"(\d+(?:\.\d+)?)(ms|s)")
_KEYS = ("ttft", "itl", "e2e")


@dataclass(frozen=True, slots=True)
class BenchSlo:
    """Seconds that a request may take at most: to its first token, for each further one on average, and to
    its end. The defaults are those of Kvasir's default class."""

    ttft_s: float = 2.0
    itl_s: float = 0.1
    e2e_s: float = math.inf

    def met(self, ttft_s: float, tpot_s: float, e2e_s: float) -> bool:
        """Whether a request meets it; `tpot_s` is NaN for a request of one token."""
        return ttft_s <= self.ttft_s and not tpot_s > self.itl_s and e2e_s <= self.e2e_s

    def __str__(self) -> str:
        parts = [f"TTFT {_shown(self.ttft_s)}", f"mean ITL {_shown(self.itl_s)}"]
        if self.e2e_s < math.inf:
            parts.append(f"E2E {_shown(self.e2e_s)}")
        return ", ".join(parts)


def parse_slo(text: str) -> BenchSlo:
    """Parse what a command line says; what it leaves out is not limited. Raises ConfigError."""
    found: dict[str, float] = {}
    for each in text.split(","):
        key, _, value = each.partition("=")
        time = _TIME.fullmatch(value)
        if key not in _KEYS or time is None or key in found:
            raise ConfigError(
                f"--slo {text}: {each!r}: write each of {', '.join(_KEYS)} once, with a unit, as in "
                "ttft=500ms,e2e=10s"
            )
        found[key] = float(time[1]) * (1e-3 if time[2] == "ms" else 1.0)
    return BenchSlo(*(found.get(key, math.inf) for key in _KEYS))


def _shown(seconds: float) -> str:
    if seconds == math.inf:
        return "any"
    return f"{seconds * 1e3:g} ms" if seconds < 1.0 else f"{seconds:g} s"
