"""Output filters in kvasir.yaml: errors name their field, before anything starts."""

from __future__ import annotations

import pytest

from kvasir.config.checks.problems import SpecError
from kvasir.config.load.loader import loads

HEAD = "output_filters:\n"


def problem(text: str) -> tuple[str, str]:
    """The field and the expectation of the one problem of a spec."""
    with pytest.raises(SpecError) as caught:
        loads(HEAD + text, "kvasir.yaml")
    (only,) = caught.value.problems
    return only.field, only.expected


def test_filters_are_read() -> None:
    text = """
  regex:
    - {name: keys, patterns: ['sk-[A-Za-z0-9]{20,}'], act: redact, parts: [content, tools]}
  classifier:
    - {name: guard, url: 'https://guard.example.com/v1', tenants: [default]}
"""
    filters = loads(HEAD + text, "kvasir.yaml").output_filters
    assert [each.name for each in filters.all] == ["keys", "guard"]


@pytest.mark.parametrize(
    ("text", "field", "expected"),
    [
        (
            "  regex: [{name: a, patterns: ['ok', '(a']}]",
            "output_filters.regex[0].patterns",
            "pattern 1 ('(a')",
        ),
        ("  regex: [{name: a, patterns: ['a*']}]", "output_filters.regex[0].patterns", "empty text"),
        ("  regex: [{name: a, patterns: ['(?=a)b']}]", "output_filters.regex[0].patterns", "lookahead"),
        ("  regex: [{name: a, patterns: []}]", "output_filters.regex[0].patterns", "at least 1"),
        (
            "  classifier: [{name: a, url: 'http://10.0.0.1/'}]",
            "output_filters.classifier[0].url",
            "private_address: true",
        ),
        (
            "  classifier: [{name: a, url: 'http://169.254.169.254/', private_address: true}]",
            "output_filters.classifier[0].url",
            "metadata",
        ),
        (
            "  classifier: [{name: a, url: 'ftp://a.example/'}]",
            "output_filters.classifier[0].url",
            "https://",
        ),
        (
            "  classifier: [{name: a, url: 'https://u:p@a.example/'}]",
            "output_filters.classifier[0].url",
            "user information",
        ),
        (
            "  classifier: [{name: a, url: 'https://a.example/', window_chars: 5000}]",
            "output_filters.classifier[0].max_held_chars",
            "at least window_chars + overlap_chars",
        ),
        (
            "  regex: [{name: a, patterns: [b], models: [nobody]}]",
            "output_filters",
            "'nobody' in models",
        ),
        ("  regex: [{name: a, patterns: [b], tenants: [who]}]", "output_filters", "'who' in tenants"),
        (
            "  regex: [{name: a, patterns: [b]}, {name: a, patterns: [b]}]",
            "output_filters",
            "names must differ",
        ),
    ],
)
def test_what_is_wrong_is_told_with_its_field(text: str, field: str, expected: str) -> None:
    found_field, found = problem(text)
    assert found_field == field
    assert expected in found


@pytest.mark.parametrize("secret", ["user:hunter2", "user:hun/ter2", "hunter2", "us@er:hunter2"])
def test_the_credentials_of_a_url_are_not_shown(secret: str) -> None:
    with pytest.raises(SpecError) as caught:
        loads(f"{HEAD}  classifier: [{{name: a, url: 'https://{secret}@a.example/'}}]", "kvasir.yaml")
    assert secret.rpartition(":")[2] not in str(caught.value)
    assert '"https://…@a.example/"' in str(caught.value)
