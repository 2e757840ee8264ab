"""What is reported of client frameworks: results of pytest, and the table of docs/API.md."""

from __future__ import annotations

from load_tests.report import REPORTS, Row, read
from load_tests.scenarios.frameworks.suites import ALL, LOCK, SUITES, Outcome, outcome, version
from load_tests.scenarios.frameworks.table import PAGE, merged, table, with_table

RESULTS = """
<testsuites><testsuite>
  <testcase classname="suite_a.TestChats" name="test_ok" />
  <testcase classname="suite_a.TestChats" name="test_images"><skipped message="Skipped: no images." />
  </testcase>
  <testcase classname="suite_a" name="test_field"><failure message="openai.BadRequestError: Error code: 400">x
  </failure></testcase>
  <testcase classname="suite_a" name="test_call"><failure message="assert 0">AssertionError</failure>
  </testcase>
</testsuite></testsuites>
"""


def test_what_the_server_refuses_is_told_apart_from_what_a_model_cannot_do() -> None:
    assert outcome(RESULTS) == Outcome(
        passed=1, skipped=("no images",), refused=("suite_a::test_field",), failed=("suite_a::test_call",)
    )


def test_the_table_has_a_line_for_each_framework() -> None:
    rows = [
        Row("A 1.0, scripted model: passed", 5, "tests", "higher", note="2 skipped: no images"),
        Row("A 1.0, scripted model: failed", 0, "tests", "lower"),
        Row("A 1.0, kvasir-tiny: passed", 3, "tests", "higher"),
        Row("A 1.0, kvasir-tiny: refused", 0, "tests", "lower"),
        Row("A 1.0, kvasir-tiny: failed", 2, "tests", "lower"),
        Row("B 2.0, scripted model: passed", 4, "tests", "higher"),
    ]
    assert table(rows).splitlines()[-2:] == ["| A 1.0 | 5, 2 | 3, 0, 2 |", "| B 2.0 | 4, 0 |  |"]


def test_another_version_of_a_framework_takes_the_place_of_the_one_before() -> None:
    def rows(*names: str) -> list[Row]:
        return [Row(name, 1, "tests", "higher") for name in names]

    earlier = rows(
        "A, chats 1.0, scripted model: passed",
        "A, chats 1.0, kvasir-tiny: passed",
        "B 2.0, scripted model: passed",
        "B 2.0, kvasir-tiny: passed",
    )
    found = rows("A, chats 1.1, scripted model: passed", "B 2.0, scripted model: passed")
    assert [row.name for row in merged(earlier, found)] == [
        "B 2.0, kvasir-tiny: passed",
        "A, chats 1.1, scripted model: passed",
        "B 2.0, scripted model: passed",
    ]


def test_the_page_has_the_table_of_the_report() -> None:
    page = PAGE.read_text()
    assert with_table(page, read(REPORTS / "frameworks.json")) == page


def test_every_suite_is_reported_at_the_version_of_the_lock_and_passes_with_a_capable_model() -> None:
    lock, rows = LOCK.read_text(), {row.name: row for row in read(REPORTS / "frameworks.json")}
    assert {suite.file for suite in ALL} == {path.name for path in SUITES.glob("suite_*.py")}
    for suite in ALL:
        name = f"{suite.framework} {version(suite.package, lock)}, scripted model"
        assert rows[f"{name}: passed"].value > 0
        assert (rows[f"{name}: refused"].value, rows[f"{name}: failed"].value) == (0, 0)
