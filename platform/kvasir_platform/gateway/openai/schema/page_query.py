"""The query of one page of a list, as all of OpenAI's lists have it."""

from __future__ import annotations

from urllib.parse import parse_qsl

from kvasir_platform.gateway.openai.schema.limits import bad

_MAX_DIGITS = 9


class PageQuery:
    """At most `limit` items behind the one with the id `after`, empty for those from the first; the newest
    come first unless `order` is asc. `further` has the other fields. Raise RequestError."""

    def __init__(self, query: bytes, *, default: int, most: int) -> None:
        given = dict(parse_qsl(query.decode("latin-1")))
        order = given.pop("order", "desc")
        if order not in ("asc", "desc"):
            raise bad("order is asc or desc.", "order")
        limit = given.pop("limit", str(default))
        digits = limit.isascii() and limit.isdecimal() and len(limit) <= _MAX_DIGITS
        if not (digits and 1 <= int(limit) <= most):
            raise bad(f"limit is a number from 1 to {most}.", "limit")
        self.newest_first = order == "desc"
        self.limit = int(limit)
        self.after = given.pop("after", "")
        self.further = given
