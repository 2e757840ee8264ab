"""The report of `kvasir plan` as data for programs."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from kvasir_platform.capacity.analysis.advice import why_layout
from kvasir_platform.capacity.analysis.memory import MemoryBudget
from kvasir_platform.capacity.analysis.uncertainty import ErrorBars
from kvasir_platform.capacity.search import CapacityPlan
from kvasir_platform.cli.plan.report import PlanReport, source_texts


def as_data(report: PlanReport) -> dict[str, Any]:
    """Return the report for programs; infinite numbers are None."""
    request = report.result.request
    traffic = request.traffic
    found: dict[str, Any] = {
        "model": {
            "name": request.model.name,
            "source": request.model.source,
            "parameters": request.model.work.parameters,
            "weights_counted": request.model.estimated,
        },
        "traffic": {
            "rate": traffic.rate,
            "peak": traffic.peak,
            "prompt_tokens": traffic.prompt,
            "cached_tokens": traffic.cached,
            "output_tokens": traffic.output,
            "burstiness": traffic.burstiness,
        },
        "slo": asdict(request.target),
        "max_model_len": request.max_model_len,
        "memory": [_memory(each) for each in report.memory],
        "plans": [_plan(plan, bars) for plan, bars in report.plans],
        "advice": [
            {
                "hardware": each.hardware.name,
                "verdict": each.verdict,
                "bandwidth_per_dollar": each.bandwidth_per_dollar,
                "stages": [asdict(stage) for stage in each.stages],
            }
            for each in report.advice
        ],
        "layouts": [
            {
                "hardware": each.option.hardware.name,
                "layout": each.option.layout,
                "devices": each.option.devices,
                "step_s": each.step_s,
                "communication": each.communication,
                "dollars_per_hour": each.dollars,
                "reason": each.reason,
            }
            for each in report.layouts
        ],
        "batches": [
            {
                "engine": each.option.title,
                "batch": each.batch,
                "step_s": each.seconds,
                "tokens_per_s": each.tokens_per_s,
                "limit": each.limit,
                "operations_per_byte": each.intensity,
                "of_peak": each.of_peak,
                "of_bandwidth": each.of_bandwidth,
                "dollars_per_million": each.dollars,
                "within_itl": each.within_itl,
            }
            for each in report.batches
        ],
        "optimisations": [asdict(each) for each in report.sheet],
        "arithmetic": list(report.arithmetic),
        "coefficients": sorted(set(source_texts(report))),
    }
    return _finite(found)  # type: ignore[no-any-return]


def _memory(budget: MemoryBudget) -> dict[str, Any]:
    option = budget.option
    return {
        "hardware": option.hardware.name,
        "price": option.hardware.offer.price_text,
        "devices": option.devices,
        "layout": option.layout,
        "fits": option.fits,
        "missing_bytes": budget.missing,
        "budget_bytes": option.fit.memory.budget,
        "bytes": dict(budget.rows),
        "context": budget.context,
        "kv": [asdict(room) for room in budget.rooms],
    }


def _plan(plan: CapacityPlan, bars: ErrorBars) -> dict[str, Any]:
    return {
        "title": plan.title,
        "mode": plan.mode.value,
        "pools": [
            {
                "role": pool.role.value,
                "hardware": pool.engine.option.hardware.name,
                "devices": pool.engine.option.devices,
                "layout": pool.engine.option.layout,
                "replicas": pool.replicas,
                "usual_replicas": pool.usual,
                "why": why_layout(pool.engine, plan.peak.streams),
                "coefficients": pool.engine.option.hardware.coefficients.source,
            }
            for pool in plan.pools
        ],
        "ttft_s": asdict(bars.ttft_s),
        "itl_s": asdict(bars.itl_s),
        "goodput": asdict(bars.goodput),
        "met": plan.peak.met,
        "busy": plan.peak.busy,
        "streams": plan.peak.streams,
        "transfer_s": plan.pair and sum(plan.pair.transfer_s) / len(plan.pair.transfer_s),
        "dollars_per_hour": plan.dollars_per_hour if plan.priced else None,
        "mean_dollars_per_hour": plan.mean_dollars_per_hour if plan.priced else None,
        "dollars_per_million": asdict(plan.prices) if plan.priced else None,
        "day": asdict(plan.day),
    }


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
