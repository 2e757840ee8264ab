"""Client frameworks, unmodified, against the real gateway in front of a scripted model that follows
instructions. Their packages are installed into an environment of their own, which takes minutes."""

from __future__ import annotations

import pytest
from load_tests.scenarios.frameworks.__main__ import SCRIPTED, check
from load_tests.scenarios.frameworks.suites import ALL

pytestmark = [pytest.mark.slow, pytest.mark.soak, pytest.mark.timeout(1800)]


def test_every_suite_passes_with_a_model_that_follows_instructions() -> None:
    rows = [row for found in check(ALL, [SCRIPTED]) for row in found]
    assert [row for row in rows if row.met is False] == []
    assert all(row.value for row in rows if row.name.endswith("passed"))
