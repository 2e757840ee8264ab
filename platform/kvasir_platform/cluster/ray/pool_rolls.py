"""What a cluster's pools need that no command waits for: rolls to a changed spec or changed pods, and starts
that failed.

Ray Serve replaces the replicas. It does not see that a free pod has another template than the waiting replica
needs: this module drains such a pod, so that KubeRay creates it again. And Serve waits forever for a pod that
does not start: this module gives up after a timeout, and the pool returns to its previous spec and pods.
A pool that never started has no previous ones, and Serve gives up on it after a few attempts, whatever the
cause: this module starts it again after growing waits, because weights may arrive and disks may be cleared.

All state of a roll is in the cluster, so that the next control process continues it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Protocol

from kvasir.ports.clock import Clock
from kvasir_platform.cluster.ray.pod_templates import PodRow
from kvasir_platform.cluster.ray.pool_commands import RestartablePoolStatus
from kvasir_platform.cluster.ray.pool_records import PoolRecord
from kvasir_platform.cluster.ray.pool_status import RUNNING, ReplicaRow

log = logging.getLogger(__name__)

# Time for a pod to get its machine, its image and its model; the drain of its predecessor is added.
POD_START_S = 1800.0
# The waits before a pool is started again double from the first to the longest.
FIRST_WAIT_S = 10.0
LONGEST_WAIT_S = 300.0
# In which a pod may be of a template of which this process has not read: the kubelet brings a changed
# ConfigMap within a minute or two.
UNREAD_S = 150.0


class RollingStatus(RestartablePoolStatus, Protocol):
    """The part of kvasir_platform.cluster.ray.pool_status.PoolStatus that is needed."""

    @property
    def ready(self) -> bool: ...

    @property
    def gave_up(self) -> bool: ...

    @property
    def remedy(self) -> str: ...


class RollablePools(Protocol):
    """The part of kvasir_platform.cluster.ray.pools.RayPools that is needed."""

    def names(self) -> Sequence[str]: ...

    def record(self, pool: str) -> PoolRecord: ...

    def desired(self, pool: str) -> str: ...

    def pods(self) -> Sequence[PodRow]: ...

    def replicas(self, pool: str) -> list[ReplicaRow]: ...

    def status(self) -> Sequence[RollingStatus]: ...

    def let_go(self, pod: PodRow) -> bool: ...

    def confirm(self, pool: str) -> None: ...

    def settle(self, pool: str) -> bool: ...

    def stop_first(self, pool: str) -> bool: ...

    def retry(self, pool: str) -> None: ...

    def start_again(self, pool: str) -> None: ...


@dataclass(frozen=True, slots=True)
class FailedStart:
    """The newest start of a pool that failed: the `attempt`, from 1; `why`; the version of the pool's record;
    when the next attempt is due, in seconds on the clock and in UTC; whether that has begun."""

    attempt: int
    why: str
    version: int
    due_s: float
    due_at: datetime
    has_next: bool = False

    @property
    def note(self) -> str:
        """What to show of it."""
        following = (
            "the next one has begun" if self.has_next else f"the next one is at {self.due_at:%H:%M:%S} UTC"
        )
        return f"attempt {self.attempt} failed, {following}: {self.why}"


def wait_after(attempt: int) -> float:
    """Return the seconds between the failure of an attempt, from 1, and the next one."""
    return min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0 ** min(attempt - 1, 16))


def _now() -> datetime:
    return datetime.now(UTC)


class _Arrivals:
    """Which pods may be of the next desired template, of which this process has not read.

    A pod says by which revision of the release it was made. `helm rollback` restores the files of an earlier
    revision with its number, so that a higher number can be of a revision that was undone, and a lower one of
    the newest state. So what counts is also when a pod arrived, and since when its pool desires another
    template.
    """

    def __init__(self) -> None:
        self._arrived: dict[str, float] = {}
        self._desired: dict[str, tuple[str, float]] = {}
        self._read = 0

    def look(self, pods: Sequence[PodRow], desired: Mapping[str, str], revision: int, now: float) -> None:
        """Take note of the pods that there are, of each pool's desired template, and of the revision of the
        file that desires them."""
        self._arrived = {pod.node_id: self._arrived.get(pod.node_id, now) for pod in pods}
        before = self._desired
        self._desired = {
            pool: before[pool] if pool in before and before[pool][0] == template else (template, now)
            for pool, template in desired.items()
        }
        self._read = max(self._read, revision)

    def may_be_next(self, pod: PodRow, now: float) -> bool:
        """Whether a pod of another template than the desired one may be of the next one."""
        arrived = self._arrived[pod.node_id]
        later = pod.revision > self._read or (pod.revision > 0 and arrived > self._desired[pod.pool][1])
        return later and now - arrived < UNREAD_S


class PoolRolls:
    """Call `step` periodically. `tell` takes an event's name and its details, `wall` returns the time of day
    in UTC, and `revision` the release's revision that desires the pods."""

    def __init__(
        self,
        pools: RollablePools,
        clock: Clock,
        tell: Callable[..., None],
        *,
        drain_s: float,
        revision: Callable[[], int],
        wall: Callable[[], datetime] = _now,
    ) -> None:
        self._pools = pools
        self._clock = clock
        self._tell = tell
        self._patience_s = POD_START_S + drain_s
        self._progress: dict[str, tuple[tuple[int, frozenset[str]], float]] = {}
        self._leaving: dict[str, str] = {}
        self._stalled: set[str] = set()
        self._wall = wall
        self._revision = revision
        self._arrivals = _Arrivals()
        self._failed: dict[str, FailedStart] = {}

    def failed_start(self, pool: str) -> FailedStart | None:
        """Return the newest start of a pool that failed, None if it serves or has not failed."""
        return self._failed.get(pool)

    def step(self, *, busy: bool, steady: bool = False) -> None:
        """Check all pools, and act. `busy`: a command is running, which completes its own roll. `steady`:
        every pool is ready."""
        desires = {pool: self._pools.desired(pool) for pool in self._pools.names()}
        pods = [pod for pod in self._pools.pods() if pod.pool in desires]
        now, rolling = self._clock.now(), []
        self._arrivals.look(pods, desires, self._revision(), now)
        for pool, desired in desires.items():
            own, record = [pod for pod in pods if pod.pool == pool], self._pools.record(pool)
            if record.template == desired:
                self._stalled.discard(pool)
                other = [pod for pod in own if pod.template != desired]
                self._let_go(pool, [pod for pod in other if not self._arrivals.may_be_next(pod, now)])
            elif pool in self._stalled and not busy:
                self._resume(pool, [pod for pod in own if pod.template == desired])
            if record.before is not None:
                rolling.append(pool)
        if steady:
            self._failed.clear()
        if not busy and (rolling or not steady):
            for status in self._pools.status():
                if status.pool in rolling:
                    self._follow(status)
                else:
                    self._start_again(status)

    def _start_again(self, status: RollingStatus) -> None:
        """Start a pool again, some time after Serve has given up on it."""
        pool, now = status.pool, self._clock.now()
        if status.ready:
            self._failed.pop(pool, None)
        if not status.gave_up:
            return
        last, version = self._failed.get(pool), self._pools.record(pool).version
        if last is None or last.version != version:
            attempt = 1 if last is None else last.attempt + 1
            wait_s = wait_after(attempt)
            why = "; ".join(each for each in (status.message or "no reason given", status.remedy) if each)
            due_at = self._wall() + timedelta(seconds=wait_s)
            self._failed[pool] = failed = FailedStart(attempt, why, version, now + wait_s, due_at)
            log.error("%s does not start: %s", pool, failed.note)
            at = failed.due_at.isoformat(timespec="seconds")
            self._tell("start_failed", pool=pool, attempt=attempt, next_at=at, message=why)
        elif now >= last.due_s:
            self._pools.start_again(pool)
            self._failed[pool] = replace(last, has_next=True)
            self._tell("starting_again", pool=pool, attempt=last.attempt + 1)

    def _let_go(self, pool: str, outdated: Sequence[PodRow]) -> None:
        """Release one free pod of another template; the next one when it is gone."""
        free = next((pod for pod in outdated if pod.free), None)
        if free is None:
            self._leaving.pop(pool, None)
        elif self._pools.let_go(free) and self._leaving.get(pool) != free.node_id:
            self._leaving[pool] = free.node_id
            self._tell("let_go", pool=pool, node=free.node_id, template=free.template)

    def _resume(self, pool: str, wanted: Sequence[PodRow]) -> None:
        """Resume a roll that was given up for lack of a pod, once there is one."""
        if any(pod.free for pod in wanted):
            self._stalled.discard(pool)
            self._pools.retry(pool)
            self._tell("resumed", pool=pool)

    def _follow(self, status: RollingStatus) -> None:
        pool = status.pool
        if status.ready:
            self._progress.pop(pool, None)
            self._pools.confirm(pool)
        elif status.failed:
            self._settle(pool, status.message)
        elif self._waits_too_long(pool):
            self._give_up(pool)

    def _waits_too_long(self, pool: str) -> bool:
        """Whether the set of serving replicas has not changed for longer than a successor may take."""
        now = self._clock.now()
        serving = frozenset(row.replica_id for row in self._pools.replicas(pool) if row.state == RUNNING)
        reached = (self._pools.record(pool).version, serving)
        last, since = self._progress.get(pool, (None, now))
        if reached != last:
            self._progress[pool] = (reached, now)
            return False
        return now - since >= self._patience_s

    def _give_up(self, pool: str) -> None:
        self._progress.pop(pool)
        minutes = round(self._patience_s / 60)
        if self._pools.stop_first(pool):
            log.warning(
                "no replica of %s started beside the old ones within %d min: each old one is stopped first",
                pool,
                minutes,
            )
            self._tell("stop_first", pool=pool)
            return
        message = (
            f"no replica of {pool} started with the changed spec or pods within {minutes} min. Find out "
            "why its pods that are not ready do not start (kubectl describe pod); with one replica, "
            f"there must be room for a second pod (pools.{pool}.maxReplicas)"
        )
        if self._settle(pool, message):
            self._stalled.add(pool)

    def _settle(self, pool: str, message: str) -> bool:
        """Return to the previous spec and pods. False if there were none."""
        self._progress.pop(pool, None)
        if not self._pools.settle(pool):
            return False
        log.error("%s returns to its previous spec and pods: %s", pool, message)
        self._tell("settled", pool=pool, message=message)
        return True
