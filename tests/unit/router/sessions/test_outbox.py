"""Commands for a worker within one loop iteration are sent as one message per kind."""

from __future__ import annotations

from kvasir.core.errors import RequestError
from kvasir.core.messages import Abort, ReleaseLeases, RouterMessage, Submit
from kvasir.core.requests import EngineRequest, Sampling, token_ids
from kvasir_router.sessions.outbox import Outbox


def leg(name: str) -> EngineRequest:
    return EngineRequest(name, token_ids([1]), Sampling())


def test_a_turn_is_one_message_of_each_kind_submits_first() -> None:
    sent: list[RouterMessage] = []
    outbox = Outbox()
    outbox.release(("l1",))
    outbox.abort(("a",))
    outbox.submit(leg("a"))
    outbox.submit(leg("b"))
    outbox.release(("l2", "l3"))
    assert outbox.flush(sent.append) == []
    assert sent == [Submit((leg("a"), leg("b"))), Abort(("a",)), ReleaseLeases(("l1", "l2", "l3"))]
    assert outbox.flush(sent.append) == []
    assert len(sent) == 3


def test_one_request_that_cannot_be_sent_does_not_hold_up_its_neighbours() -> None:
    sent: list[RouterMessage] = []

    def send(message: RouterMessage) -> None:
        if isinstance(message, Submit) and any(r.request_id == "huge" for r in message.requests):
            raise RequestError("too large", status=413, code="request_too_large")
        sent.append(message)

    outbox = Outbox()
    for name in ("a", "huge", "b"):
        outbox.submit(leg(name))
    ((refused, error),) = outbox.flush(send)
    assert (refused.request_id, error.code) == ("huge", "request_too_large")
    assert sent == [Submit((leg("a"),)), Submit((leg("b"),))]


def test_what_was_to_be_said_in_a_session_that_is_over_is_forgotten() -> None:
    sent: list[RouterMessage] = []
    outbox = Outbox()
    outbox.submit(leg("a"))
    outbox.abort(("b",))
    outbox.clear()
    outbox.flush(sent.append)
    assert sent == []
