"""How long a request's KV takes from each place to each other, over the links that are known."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvasir.ports.routing import LINKS, Candidates, FloatColumn, IntColumn, LinkColumns, LinkGrid, RequestView


class Moves(NamedTuple):
    """Transfers from each of some places to each of others: the class of their link, and the seconds by which
    they exceed what the receiver needs over a link of the class UNKNOWN."""

    grid: LinkGrid
    excess_s: FloatColumn


class Transfers:
    """The transfers of one decision. `unknown_s` is what each place needs over a link of the class
    UNKNOWN."""

    def __init__(
        self, request: RequestView, candidates: Candidates, links: LinkColumns, unknown_s: FloatColumn
    ) -> None:
        self._links = links
        moved = (request.prompt_tokens - candidates.cached_tokens) * candidates.kv_token_bytes
        excess: FloatColumn = np.zeros((LINKS + 1, len(unknown_s)))
        known = excess[:LINKS]
        np.multiply(links.byte_s, moved, out=known)
        known += links.fixed_s
        known -= unknown_s
        self._excess, self._places = excess.ravel(), len(unknown_s)

    def between(self, prefills: IntColumn, decodes: IntColumn) -> Moves:
        """Return the transfers of each pair."""
        grid = self._links.between(prefills, decodes)
        return Moves(grid, self._excess_of(grid, decodes))

    def least_excess_s(self, prefills: IntColumn) -> FloatColumn:
        """Return the excess of every place's transfer from the one of these that is nearest to it."""
        nearest = self._links.nearest(prefills)
        return self._excess_of(nearest, np.arange(self._places))

    def _excess_of(self, grid: LinkGrid, decodes: IntColumn) -> FloatColumn:
        at = grid.astype(np.intp)
        at *= self._places
        at += decodes
        excess: FloatColumn = self._excess.take(at)
        return excess
