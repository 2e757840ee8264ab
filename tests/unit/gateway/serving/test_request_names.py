"""The router's ids of a call are found by the id that its client received."""

from __future__ import annotations

from kvasir_platform.gateway.serving.request_names import RequestNames


def test_the_newest_calls_are_known_by_their_clients_ids() -> None:
    names = RequestNames(40)
    for number in range(100):
        names.note(f"call {number}", (f"r{number}/0", f"r{number}/1"))
    assert [names.find(f"call {number}") for number in (59, 60, 99)] == [
        ("call 59",),
        ("r60/0", "r60/1"),
        ("r99/0", "r99/1"),
    ]


def test_of_two_calls_with_one_id_the_later_one_is_found() -> None:
    names = RequestNames(3)
    for name in ("first", "second"):
        names.note("same", (name,))
    assert names.find("same") == ("second",)
    names.note("größe 🙂", ())
    assert names.find("größe 🙂") == ()
    assert names.find("same") == ("second",)


def test_a_capacity_of_nothing_keeps_no_names() -> None:
    names = RequestNames(0)
    names.note("call", ("r",))
    assert names.find("call") == ("call",)
