"""References in the pages exist: pages, metrics, fields of the spec, codes, commands, targets and tests."""

from __future__ import annotations

import argparse
import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from kvasir.config.spec.deployment import Deployment
from kvasir.core.demand import PoolPlan
from kvasir.core.kv import KvState, KvStatus, Medium, TierLoad
from kvasir.core.locality import LinkClass
from kvasir.core.requests import EngineLoad
from kvasir.native import TreeStats
from kvasir.ports.router import Accounting, AdmissionView, CellView, LinkTransfers, RegretView, WorkerView
from kvasir.telemetry.metrics import Metrics
from kvasir.telemetry.reasons import OK, REASONS
from kvasir.telemetry.route_series import RolloutStats
from kvasir.telemetry.tenant_series import (
    BatchStats,
    BudgetUse,
    CostStats,
    RateLimitStats,
    TenantStats,
    TenantUsage,
)
from kvasir.telemetry.tokenizer_series import TokenizerStats
from kvasir_platform.cli.main import parser

ROOT = Path(__file__).resolve().parents[2]
DOCS = sorted((ROOT / "docs").glob("*.md"))
PACKAGES = ("kvasir_platform", "kvasir_router", "kvasir_workers")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS, *sorted((ROOT / "docs" / "adr").glob("*.md"))]


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


@cache
def every_series() -> set[str]:
    """The names under which all there is can be scraped."""
    metrics = Metrics(registry := CollectorRegistry(), ["m"], ["s"])
    load = EngineLoad(tiers=(TierLoad(Medium.CPU),))
    metrics.workers([WorkerView("w", "a", "p", "ready", load=load, kv=KvStatus(KvState.EXACT, "", 0.0))])
    metrics.track_index(lambda: TreeStats(*[0] * 9))
    metrics.track_accounting(lambda: Accounting(0, 0, 0, 0, 0))
    metrics.track_regret(lambda: {"m": RegretView(causes={"queue": 0.0})})
    metrics.track_rollouts(lambda: {"chat": RolloutStats(0.05, {"itl": 0.0})})
    metrics.track_cells(lambda: [CellView("eu", "here", sent={"nearest": 1})])
    metrics.track_links(lambda: {"m": {LinkClass.RACK: LinkTransfers()}})
    metrics.track_admission(lambda: {"m": AdmissionView()})
    metrics.track_scaling(lambda: {"p": PoolPlan(1, 1, 0, applied=True)}, lambda: 0.0)
    metrics.track_tenants(
        lambda: TenantStats((TenantUsage("t"),), RateLimitStats(shared=True, local_decisions=0))
    )
    metrics.track_batches(lambda: BatchStats(lines=Counter(answered=1)))
    metrics.track_costs(
        lambda: CostStats({"t": {"decode": 0.0}}, {"t": 0.0}, [BudgetUse("t", {"hard": 0.0})], stored=True)
    )
    metrics.track_certificate(lambda: 0.0)
    metrics.track_discovery(lambda: 0.0)
    metrics.track_tokenizer("m", lambda: TokenizerStats(fast=True))
    return {
        family.name + ("_total" if family.type == "counter" else "")
        for family in registry.collect()
        if family.name.startswith("kvasir_")
    }


@cache
def every_field() -> set[str]:
    """Each field of the spec by its path, as pages write it: from the top, the gateway, or a pool."""
    schema = Deployment.model_json_schema()
    found: set[str] = set()

    def walk(part: dict[str, Any], path: str) -> None:
        for name, shape in part.get("properties", {}).items():
            found.add(path + name)
            for reference in re.findall(r'"#/\$defs/(\w+)"', json.dumps(shape)):
                walk(schema["$defs"][reference], f"{path}{name}.")

    walk(schema, "")
    return found | {name.removeprefix(where) for name in found for where in ("pools.", "gateway.")}


@cache
def commands() -> set[str]:
    groups = [each for each in parser()._actions if isinstance(each, argparse._SubParsersAction)]
    return {name for group in groups for name in group.choices}


@cache
def anchors(page: Path) -> set[str]:
    """The headings of a page as links name them."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_link_leads_somewhere(page: Path) -> None:
    for path, anchor in re.findall(r"\]\((?!http)([^)#\s]*)(?:#([^)\s]*))?\)", page.read_text("utf-8")):
        target = Path(os.path.normpath(page.parent / path)) if path else page
        assert target.exists(), path
        assert not anchor or anchor in anchors(target), f"{path}#{anchor}"


@pytest.mark.parametrize("page", DOCS, ids=named)
def test_every_series_that_a_page_names_can_be_scraped(page: Path) -> None:
    known = every_series()
    for row in page.read_text("utf-8").splitlines():
        whole = [name for name in re.findall(r"\bkvasir_[a-z_]+[a-z]\b", row) if name not in PACKAGES]
        for name in whole:
            assert name in known, name
        # What a table writes as `_rest` has its beginning in common with the row's first one.
        for rest in re.findall(r"`(_[a-z_]+)[`{]", row):
            beginnings = {name[: at.start()] for name in whole for at in re.finditer("_", name)}
            assert any(beginning + rest in known for beginning in beginnings), rest


@pytest.mark.parametrize("page", [each for each in PAGES if each.name != "errors.md"], ids=named)
def test_every_field_that_a_page_names_is_in_the_spec(page: Path) -> None:
    fields = every_field()
    tops = {name.partition(".")[0] for name in fields if "." in name}
    for name in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)[:`]", page.read_text("utf-8")):
        if name.partition(".")[0] in tops:
            assert name in fields, name


def rows(page: Path, heading: str) -> Iterator[str]:
    """The first cells of the tables whose first column has this heading."""
    within = False
    for line in page.read_text("utf-8").splitlines():
        first = line.split("|")[1].strip() if line.startswith("|") else ""
        if first == heading:
            within = True
        elif not first:
            within = False
        elif within and not first.startswith("--"):
            yield first


@pytest.mark.parametrize("heading", ["outcome", "code"])
def test_every_code_in_the_runbook_is_one(heading: str) -> None:
    cells = list(rows(ROOT / "docs" / "RUNBOOK.md", heading))
    assert cells
    for cell in cells:
        for code in re.findall(r"`([a-z_]+)`", cell):
            assert code in REASONS or code == OK, code


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_command_that_a_page_names_is_understood(page: Path) -> None:
    understood = commands()
    for name in re.findall(r"(?:`|^)kvasir ([a-z]+)\b", page.read_text("utf-8"), re.MULTILINE):
        assert name in understood, name


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_test_file_that_a_page_names_exists(page: Path) -> None:
    for path in re.findall(r"`(tests/[\w/.]+)(?:::\w+)?`", page.read_text("utf-8")):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_target_that_a_page_names_is_one_of_the_makefile(page: Path) -> None:
    rules = (ROOT / "Makefile").read_text("utf-8")
    for name in re.findall(r"`make ([a-z-]+)", page.read_text("utf-8")):
        assert re.search(rf"^(?:[a-z-]+ )*{name}(?: [a-z-]+)*:", rules, re.MULTILINE), name
