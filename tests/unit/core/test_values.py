"""Values are small, immutable, hashable, compare by content, and pass for dataclasses."""

from __future__ import annotations

import gc
import pickle
from array import array
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

import msgspec
import pytest
from mypy import api

from kvasir.core.requests import Delta, Usage
from kvasir.core.values import changed, contents, retyped, value

TWO_WAYS_TO_CHANGE_ONE = """
from kvasir.core.requests import Delta
from kvasir.ports.router import RequestSummary

def change(delta: Delta, summary: RequestSummary) -> None:
    delta.text = "other"
    summary.outcome = "ok"
"""


class Written:
    """A class as it is written, of which a value and a dataclass are made."""

    name: str
    tokens: tuple[int, ...] = ()
    usage: Usage = Usage()
    labels: dict[str, str] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return len(self.tokens)


@value
class Series:
    numbers: array[float]
    name: str = "a"
    more: array[float] = field(default_factory=lambda: array("d"))


def written() -> type[Written]:
    """A class of its own for each decorator."""
    return type("Written", (), {key: each for key, each in vars(Written).items() if key != "__dict__"})


def test_a_value_is_encoded_as_the_dataclass_that_it_replaces() -> None:
    made, classic = value(written()), dataclass(written())
    for arguments in (("a",), ("a", (1, 2), Usage(3), {"b": "c"})):
        one, other = made(*arguments), classic(*arguments)
        assert msgspec.json.encode(one) == msgspec.json.encode(other)
        assert msgspec.msgpack.encode(one) == msgspec.msgpack.encode(other)
        assert asdict(one) == asdict(other)  # type: ignore[call-overload]  # a dataclass at run time
        assert one.count == other.count
        assert contents(one) == tuple(getattr(one, each.name) for each in fields(one))  # type: ignore[arg-type]  # likewise


def test_a_value_cannot_be_changed_at_run_time_either() -> None:
    with pytest.raises(AttributeError, match="immutable"):
        Usage().prompt_tokens = 1  # type: ignore[misc]  # refused by the type checker as well


def test_each_value_has_a_default_of_its_own() -> None:
    assert Series(array("d")).more is not Series(array("d")).more


@pytest.mark.parametrize(
    "one", [field(init=False), field(repr=False), field(compare=False), field(kw_only=True)]
)
def test_a_field_with_an_option_that_would_be_ignored_is_refused(one: object) -> None:
    made = type("Made", (), {"name": one, "__annotations__": {"name": "str"}})
    with pytest.raises(TypeError, match=r"Made\.name"):
        value(made)


def test_a_value_is_pickled() -> None:
    delta = Delta("r", 7, (1, 2), "a", usage=Usage(prompt_tokens=5))
    assert pickle.loads(pickle.dumps(delta)) == delta


def test_values_of_numbers_are_not_visited_by_the_garbage_collector() -> None:
    assert not gc.is_tracked(Usage(prompt_tokens=5))


def test_a_decoder_reads_a_value_whose_fields_it_would_not_know_by_another_type() -> None:
    known = retyped(Series, numbers=list[float], more=list[float])
    decoder = msgspec.msgpack.Decoder(known)
    found = decoder.decode(msgspec.msgpack.encode({"numbers": [1.5], "name": "b", "more": [2.5]}))
    assert isinstance(found, Series)
    assert contents(found) == ([1.5], "b", [2.5])
    assert [each.name for each in fields(known)] == ["numbers", "name", "more"]


def test_equal_fields_make_equal_values_with_equal_hashes() -> None:
    one, other = Delta("r", 0, (1,), "a"), Delta("r", 0, (1,), "a")
    assert one == other
    assert len({one, other, replace(one, text="b")}) == 2


def test_a_value_has_no_room_for_what_is_not_a_field() -> None:
    assert not hasattr(Usage(), "__dict__")


def test_a_changed_value_is_another_one_that_differs_in_these_fields_only() -> None:
    usage = Usage(prompt_tokens=5, cached_tokens=4, transferred_bytes=3, tier_tokens=2)
    delta = Delta("r", 7, (1, 2), "a", index=1, last=True, usage=usage, raw_length=9)
    made = changed(delta, text="b", usage=None)
    assert made == replace(delta, text="b", usage=None)
    assert (delta.text, delta.usage) == ("a", usage)
    assert changed(usage) == usage
    assert changed(usage) is not usage


def test_a_value_cannot_be_changed_in_what_is_not_a_field() -> None:
    with pytest.raises(TypeError, match="colour"):
        changed(Usage(), colour=1)


@pytest.mark.slow
def test_the_type_checker_refuses_to_change_a_value(tmp_path: Path) -> None:
    changing = tmp_path / "changing.py"
    changing.write_text(TWO_WAYS_TO_CHANGE_ONE)
    said, _, _ = api.run(
        [str(changing), "--cache-dir", str(tmp_path / "cache"), "--follow-imports", "silent"]
    )
    assert said.count("read-only") == 2, said
