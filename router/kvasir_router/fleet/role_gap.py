"""Whether requests may run on workers of any role, because no worker of the role that they need serves.

    complete ──a role is lost──▶ lacking ──`after_s`──▶ open ──the role is back──▶ complete

A fleet that was never complete, or not since its model slept, is starting, and its requests wait for the role
that is not there yet. Pure: no clock.
"""

from __future__ import annotations

from collections.abc import Callable


def _unobserved(_missing: str | None) -> None:
    """Do nothing."""


class RoleGap:
    """The gap in the roles of one fleet. `open`: requests may run whole on any worker that can. `after_s`:
    how long a role is waited for, None for as long as it takes. `on_change` gets what is missing when the gap
    opens, and None when it closes; it must not block or raise."""

    def __init__(
        self, after_s: float | None = None, on_change: Callable[[str | None], None] = _unobserved
    ) -> None:
        self._after_s = after_s
        self._on_change = on_change
        self._complete = False
        self._missing: str | None = None
        self._since_s: float | None = None
        self.open = False

    def note(self, missing: str | None) -> None:
        """Set which role the serving workers lack, None for none; call it on every change of them."""
        self._missing = missing
        if missing is not None:
            return
        self._close(complete=True)

    def asleep(self) -> None:
        """The model has no worker because it is not used: the next ones start it."""
        self._close(complete=False)

    def _close(self, *, complete: bool) -> None:
        if self.open:
            self._on_change(None)
        self._complete, self.open, self._since_s = complete, False, None

    def look(self, now: float, *, hurried: bool = False) -> bool:
        """Return whether the gap has opened since the last call. `hurried`: a stream has waited for more than
        one worker, and waits for no missing role."""
        if self.open or self._missing is None or not self._complete or self._after_s is None:
            return False
        if self._since_s is None:
            self._since_s = now
        if now < self._since_s + self._after_s and not hurried:
            return False
        self.open = True
        self._on_change(self._missing)
        return True

    def next_due(self) -> float | None:
        """Return when `look` will open the gap, None if time alone does not."""
        if self.open or self._since_s is None or self._after_s is None:
            return None
        return self._since_s + self._after_s
