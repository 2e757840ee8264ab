"""Output filter for regular expressions.

Every character in any match is redacted, not only the matches of a search from left to right, so that one
pass decides, and the result depends neither on how the text was split into pieces nor on the order of
alternatives. A character is released as soon as no match that begins at or before it can still complete.
"""

from __future__ import annotations

from collections.abc import Callable

from kvasir.config.checks.patterns import build_graph
from kvasir.config.spec.filters import RegexFilterSpec
from kvasir.ports.output_filter import FilterAction, FilterSubject, RulingCallback
from kvasir_platform.gateway.filters.automaton import Automaton, Scan
from kvasir_platform.gateway.filters.scope import FilterScope
from kvasir_platform.gateway.filters.spans import Spans

Count = Callable[[str], None]
"""Called with the action taken, as metrics label it."""


class RegexFilter:
    """`OutputFilter` for the patterns of a spec. `count` is called for each text that it changes or ends."""

    def __init__(self, spec: RegexFilterSpec, count: Count) -> None:
        self.name = spec.name
        self.replacement = spec.replacement
        self.max_held_chars = spec.max_held_chars
        self.max_held_s = spec.max_held_s
        self._spec = spec
        self._scope = FilterScope(spec)
        self._automaton = Automaton(build_graph(spec.patterns, ignore_case=spec.ignore_case))
        self._count = count

    def applies(self, subject: FilterSubject) -> bool:
        """Return whether the spec names the model, tenant and part."""
        return self._scope.has(subject)

    def judge(self, subject: FilterSubject, rule: RulingCallback, before: str = "") -> RegexJudge:
        """Start a text."""
        scan = Scan(self._automaton)
        kept = before[-self.max_held_chars :]
        if len(kept) < len(before):
            scan.enter(before[-len(kept) - 1])
        # The filter has ruled on matches in that text.
        scan.feed(kept)
        return RegexJudge(self._spec, scan, rule, self._count)

    async def close(self) -> None:
        """Do nothing: no resource is open."""


class RegexJudge:
    """One text. `feed` rules on every character except those of an unfinished match, of which at most the
    last `max_held_chars` are held."""

    def __init__(self, spec: RegexFilterSpec, scan: Scan, rule: RulingCallback, count: Count) -> None:
        self._scan = scan
        self._rule = rule
        self._count = count
        self._held = spec.max_held_chars
        self._ends = spec.act == "end"
        self._ends_at_bound = spec.at_bound == "end"
        self._base = scan.position
        """Position in the scan at which this text begins."""
        self._ruled = scan.position
        self._covered = Spans()
        """Ranges of matches that were not ruled on."""
        self._redacts = False
        self._released = False
        self._over = False

    def feed(self, text: str) -> None:
        """Rule on the characters that `text` decides."""
        if self._over:
            return
        scan = self._scan
        found = scan.feed(text, only_first=self._ends, longest=self._held if self._ends_at_bound else None)
        if found or scan.starts or self._covered:
            self._settle(found)
        else:
            # The common case.
            self._ruled = scan.position
            self._rule(scan.position - self._base, FilterAction.PASS)

    def finish(self) -> None:
        """Rule on the rest."""
        if not self._over:
            found = self._scan.finish()
            self._scan.starts = []
            self._settle(found)

    def expire(self) -> None:
        """Release the held text or end the choice; a match that completes later is still found."""
        if self._over or self._ruled >= self._scan.position:
            return
        if self._ends_at_bound:
            self._end(self._ruled, "ended_at_bound")
        else:
            if not self._released:
                self._released = True
                self._count("released_at_bound")
            self._advance(self._scan.position, FilterAction.PASS)

    def close(self) -> None:
        """Send no more rulings."""
        self._over = True

    def _settle(self, found: list[tuple[int, int]]) -> None:
        scan, held = self._scan, self._held
        for first, end in found:
            # Text further back was passed, or would have been if the text had arrived in smaller
            # pieces.
            begun = max(first, end - held, self._ruled)
            if self._ends:
                self._end(begun, "ended")
                return
            if begun < end:
                self._covered.add(begun, end)
        waits = scan.starts[0] if scan.starts else scan.position
        bound = scan.position - held
        if waits < bound and self._ends_at_bound:
            self._rule_until(waits)
            self._end(max(waits, self._ruled), "ended_at_bound")
            return
        if max(waits, self._ruled) < bound and not self._released:
            self._released = True
            self._count("released_at_bound")
        self._rule_until(max(waits, bound))

    def _rule_until(self, limit: int) -> None:
        """Pass text outside matches up to `limit`; rule on matches even beyond it."""
        while taken := self._covered.take(max(limit, self._ruled)):
            for begun, end in taken:
                self._advance(begun, FilterAction.PASS)
                self._advance(end, FilterAction.REDACT)
        self._advance(limit, FilterAction.PASS)

    def _advance(self, until: int, act: FilterAction) -> None:
        if until > self._ruled:
            if act is FilterAction.REDACT and not self._redacts:
                self._redacts = True
                self._count("redacted")
            self._ruled = until
            self._rule(until - self._base, act)

    def _end(self, until: int, what: str) -> None:
        self._over = True
        self._count(what)
        self._rule(until - self._base, FilterAction.END)
