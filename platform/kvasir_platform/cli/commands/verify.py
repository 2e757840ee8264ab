"""`kvasir verify`: measures a running deployment, and checks that its answers are right."""

from __future__ import annotations

import argparse
import random
from datetime import datetime
from pathlib import Path

from kvasir.core.errors import ConfigError
from kvasir_platform.cli.common.gateway_client import status_of
from kvasir_platform.cli.common.gateway_site import Site, read_address
from kvasir_platform.cli.common.output import CommandOutput, table
from kvasir_platform.cli.common.running import GatewayAddress, gateway_site
from kvasir_platform.cli.verify.arguments import QUALITY_TOKENS
from kvasir_platform.cli.verify.client import VerifyClient
from kvasir_platform.cli.verify.held_out import read_held_out
from kvasir_platform.cli.verify.limits import QualityLimits
from kvasir_platform.cli.verify.quality import LiveBaseline, QualityBaseline, QualityOptions, SavedBaseline
from kvasir_platform.cli.verify.report import (
    CURVE_HEAD,
    QUALITY_HEAD,
    TRANSFER_HEAD,
    as_json,
    curve_rows,
    quality_rows,
    transfer_rows,
    write_report,
)
from kvasir_platform.cli.verify.run import Verification, Verifier, VerifyOptions
from kvasir_platform.cli.verify.score_file import read_scores
from kvasir_platform.reports.files import check_folder

_MARKS = {"pass": "ok ", "fail": "ERR", "skip": "-- "}


_COMPARED = {
    "max_perplexity_ratio": "perplexity_ratio",
    "min_agreement": "agreement",
    "max_kl": "kl_nats",
}
"""Options that need a baseline, and the limits that they set."""


def quality_options(args: argparse.Namespace, site: Site) -> QualityOptions | None:
    """Return what the command line `args` asks for of accuracy, None for nothing; `site` is the gateway that
    is verified. Reads the files that it names. Raises ConfigError, and UpstreamError from the baseline."""
    given = {
        name: value
        for name, value in vars(args).items()
        if name in ("max_perplexity", *_COMPARED) or name.startswith("quality")
        if value not in (None, False)
    }
    if not given:
        return None
    baseline = _baseline(args, site)
    for name in _COMPARED:
        if name in given and baseline is None:
            option = name.replace("_", "-")
            raise ConfigError(f"--{option} needs --quality-baseline or --quality-baseline-model")
    limits = QualityLimits(
        perplexity=args.max_perplexity,
        **{limit: given[name] for name, limit in _COMPARED.items() if name in given},
    )
    held_out = read_held_out(args.quality_set)
    return QualityOptions(held_out, args.quality_tokens or QUALITY_TOKENS, baseline, limits)


def _baseline(args: argparse.Namespace, site: Site) -> QualityBaseline | None:
    named, model = args.quality_baseline, args.quality_baseline_model
    if named is None and model is None:
        return None
    if named is not None and (named.endswith(".json") or Path(named).exists()):
        if model is not None:
            raise ConfigError("--quality-baseline-model is for a deployment; a file has one model")
        return SavedBaseline(read_scores(Path(named)))
    if named is not None:
        try:
            secure = read_address(named).scheme == "https"
        except ConfigError as error:
            raise ConfigError(f"--quality-baseline {named}: no such file, and no HOST:PORT") from error
        files = (args.cacert, args.cert, args.key) if secure else (None, None, None)
        site = gateway_site(GatewayAddress(None, named, *files))
    status = status_of(site)
    models = status["models"]
    chosen = model or (args.model if args.model in models else models[0])
    if chosen not in models:
        raise ConfigError(f"--quality-baseline-model {chosen}: {site.url} serves {', '.join(models)}")
    name = f"{chosen} of {status['deployment']} at {site.authority}"
    return LiveBaseline(VerifyClient(site, chosen, args.timeout), name)


def verify(
    options: VerifyOptions, site: Site, prefix: Path | None, output: CommandOutput, now: datetime
) -> int:
    """Run all steps, print what was found and write the report. Return 1 if a check failed."""
    check_folder(None if prefix is None else prefix.with_name(f"{prefix.name}.json"), "--report")
    verifier = Verifier(
        site,
        options,
        lambda text: output.text(f"... {text}"),
        began=now.isoformat(timespec="seconds"),
        rng=random.Random(),  # noqa: S311 - unique prompts, no secrets
    )
    found = verifier.run()
    output.data(as_json(found))
    _print(found, output)
    if prefix is not None:
        try:
            written = write_report(found, prefix)
        except OSError as error:
            raise ConfigError(f"--report {prefix}: {error.strerror or error}") from error
        output.text(f"\nreport: {', '.join(map(str, written))}")
    return 0 if found.passed else 1


def _print(found: Verification, output: CommandOutput) -> None:
    output.text(f"\n{found.deployment}: {found.model}, disaggregation {found.disaggregation}")
    for each in found.hardware:
        output.text(f"  {each}")
    output.text()
    for check in found.checks:
        output.text(f"{_MARKS[check.result]} {check.name}: {check.detail}")
    if found.quality is not None:
        output.text(f"\n{table(QUALITY_HEAD, quality_rows(found.quality), range(1, 5))}")
    if found.transfers:
        output.text(f"\n{table(TRANSFER_HEAD, transfer_rows(found), range(5))}")
    if found.curve:
        output.text(f"\n{table(CURVE_HEAD, curve_rows(found.curve), range(7))}")
