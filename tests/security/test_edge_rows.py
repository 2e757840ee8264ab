"""Rows of the scorecard about the edge, at a small size, with real processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from load_tests.scenarios.scorecard import run as scorecard
from load_tests.scenarios.scorecard.clients import row17, row18
from load_tests.scenarios.scorecard.common import Figure, Trial
from load_tests.scenarios.scorecard.security import row21, row22


def assert_met(figures: list[Figure]) -> None:
    """What took how long is the scorecard's own business."""
    kept = tuple(figure for figure in figures if figure.unit not in ("s", "ms", "%"))
    rows = scorecard.report_rows(scorecard.Result(17, kept), 1)
    assert all(row.met is not False for row in rows), [row for row in rows if row.met is False]
    assert any(row.met for row in rows)


@pytest.mark.slow
async def test_dawdlers_and_bombs_are_cut_and_others_are_served(tmp_path: Path) -> None:
    size = row17.Size(workers=1, clients=4, rate=4.0, tokens=10, pairs=1, window_s=3.0)
    assert_met(await row17.measure(Trial(tmp_path, 21, quiet=True), size))


@pytest.mark.slow
async def test_malformed_requests_desynchronize_nobody(tmp_path: Path) -> None:
    assert_met(await row18.measure(Trial(tmp_path, 22, quiet=True), row18.Size(victims=1, rounds=1)))


@pytest.mark.slow
async def test_no_url_of_anybodys_is_fetched(tmp_path: Path) -> None:
    assert_met(await row21.measure(Trial(tmp_path, 24, quiet=True), row21.Size(real=False, linger_s=0.3)))


@pytest.mark.slow
async def test_no_engine_fetches_what_a_schema_refers_to(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    assert_met(await row21.measure(Trial(tmp_path, 25, quiet=True), row21.Size(linger_s=0.3)))


@pytest.mark.slow
async def test_no_process_page_or_file_tells_a_secret(tmp_path: Path) -> None:
    assert_met(await row22.measure(Trial(tmp_path, 23, quiet=True), row22.Size(requests=10)))


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("-----BEGIN PRIVATE KEY-----\n" + "A" * 64, ["private key"]),
        ("AKIA" + "ABCDEFGHIJKLMNOP", ["key of a cloud"]),
        ("sk-" + "a1" * 20, ["key of a model service"]),
        ("redis://user:" + "hunter22" + "@redis.example.com", ["password in a URL"]),
        ("sk-short, redis://localhost:6379, -----BEGIN CERTIFICATE-----", []),
    ],
)
def test_what_looks_like_a_secret_is_found(text: str, kinds: list[str]) -> None:
    assert list(row22._secrets_in(text)) == kinds
