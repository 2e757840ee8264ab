"""Names and sources of adapters, and what an allow-list covers."""

from __future__ import annotations

import pytest

from kvasir.core.adapters import HeldAdapter, allows, name_problem, pattern_problem, source_kind


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("/models/adapters/sql", "folder"),
        ("s3://my-bucket/adapters/sql", "s3"),
        ("my-org/sql-lora", "hub"),
        ("my-org/sql-lora@refs/pr/1", "hub"),
    ],
)
def test_the_kind_of_a_source_is_seen_from_its_form(source: str, kind: str) -> None:
    assert source_kind(source) == kind


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("sql", "none of: an absolute folder"),
        ("./sql", "has a part"),
        ("/adapters/../etc", "has a part"),
        ("s3://my-bucket/a/../b", "has a part"),
        ("s3://B/x", "no valid S3 address"),
        ("https://example.com/x", "none of"),
        ("a/b/c", "none of"),
        ("/a\nb", "printable"),
        ("/" + "a" * 1024, "at most 1024"),
    ],
)
def test_what_is_no_source_is_refused_with_the_valid_forms(source: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        source_kind(source)


@pytest.mark.parametrize(
    ("pattern", "source", "allowed"),
    [
        ("/adapters", "/adapters", True),
        ("/adapters/", "/adapters/sql", True),
        ("/adapters", "/adapters//sql/", True),
        ("/adapters", "/adapters2/sql", False),
        ("/adapters", "/other/adapters/sql", False),
        ("/", "/anything", True),
        ("s3://my-bucket", "s3://my-bucket/sql", True),
        ("s3://my-bucket/lora", "s3://my-bucket/lora/sql", True),
        ("s3://my-bucket/lora", "s3://my-bucket/lora-secret", False),
        ("s3://my-bucket", "s3://my-bucket2/sql", False),
        ("s3://my-bucket", "/my-bucket/sql", False),
        ("my-org/", "my-org/sql", True),
        ("my-org/", "my-org2/sql", False),
        ("my-org/", "/my-org/sql", False),
        ("my-org/sql", "my-org/sql@v2", True),
        ("my-org/sql", "my-org/sql2", False),
        ("my-org/sql@v2", "my-org/sql@v2", True),
        ("my-org/sql@v2", "my-org/sql@v3", False),
        ("my-org/sql@v2", "my-org/sql", False),
    ],
)
def test_an_entry_covers_what_is_below_it_and_nothing_that_only_begins_alike(
    pattern: str, source: str, allowed: bool
) -> None:
    assert pattern_problem(pattern) is None
    assert allows((pattern,), source) == allowed
    assert not allows((), source)


@pytest.mark.parametrize("pattern", ["adapters", "my-org/*", "./adapters", "s3://", "/a/../b"])
def test_an_entry_that_covers_nothing_is_refused(pattern: str) -> None:
    assert pattern_problem(pattern) is not None


def test_names_are_those_that_models_may_have() -> None:
    assert name_problem("org/sql-v2.1@x") is None
    for name in ("", "-sql", "s q l", "sql\n", "a" * 257):
        assert name_problem(name) is not None


def test_other_weights_under_one_name_have_another_key() -> None:
    first = HeldAdapter("sql", "/a", 0, "0123", 8, 100)
    second = HeldAdapter("sql", "/a", 0, "4567", 8, 100)
    assert (first.key, second.key) == ("sql@0123", "sql@4567")
