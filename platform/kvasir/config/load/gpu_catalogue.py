"""Reads a file with GPUs and prices of one's own, over those of the built-in catalogue.

An entry with the name of a known GPU changes the fields that it has; one with another name adds a GPU, and
needs its memory, bandwidth and FLOP/s.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from kvasir.config.checks.problems import Problem, SpecError
from kvasir.config.load.loader import validated
from kvasir.config.load.yaml_document import Document, parse, read_file
from kvasir.config.spec.base import Spec
from kvasir.hardware.gpus import GIB, Gpu
from kvasir.hardware.offers import UNKNOWN, OfferedGpu, catalogue

_SUBJECT = "the GPU catalogue"
_NEEDED = ("memory_gib", "bandwidth_tb_per_s", "half_tflops")
_Positive = Annotated[float, Field(gt=0)]


class CatalogueEntry(Spec):
    """One GPU."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][-A-Za-z0-9_.]*$", max_length=40)]
    """As in the catalogue, or a new one."""
    dollars_per_hour: Annotated[float, Field(ge=0)] | None = None
    """Price of one GPU for an hour."""
    source: str | None = Field(default=None, max_length=200)
    """Who asks this price."""
    date: str | None = Field(default=None, max_length=40)
    """When."""
    memory_gib: _Positive | None = None
    """Memory that a process finds on the device."""
    bandwidth_tb_per_s: _Positive | None = None
    """Of the device's memory."""
    half_tflops: _Positive | None = None
    """Dense, with operands of 16 bits."""
    single_tflops: _Positive | None = None
    """With operands of 32 bits."""
    fp8_tflops: Annotated[float, Field(ge=0)] | None = None
    """Dense, with FP8 operands; 0 without such units."""
    watts: int | None = Field(default=None, gt=0)
    """Maximum power."""
    nvlink_gb_per_s: Annotated[float, Field(ge=0)] | None = None
    """Sum of both directions; 0 without."""
    nvlink_gpus: int | None = Field(default=None, ge=1, le=576)
    """GPUs that it joins."""
    pcie_gb_per_s: _Positive | None = None
    """One direction."""
    per_node: int | None = Field(default=None, ge=1, le=64)
    """GPUs of a node."""


class _CatalogueFile(Spec):
    gpus: tuple[CatalogueEntry, ...] = Field(min_length=1, max_length=200)


def read_catalogue(path: Path) -> tuple[OfferedGpu, ...]:
    """Return the built-in catalogue with the entries of `path`. Raises SpecError with all problems, each with
    its field and line."""
    source = str(path)
    try:
        document = parse(read_file(path), source)
        entries = validated(_CatalogueFile, document, source).gpus
    except SpecError as error:
        raise SpecError(error.problems, _SUBJECT) from error
    found = {each.name: each for each in catalogue()}
    problems = []
    for at, entry in enumerate(entries):
        known = found.get(entry.name)
        missing = [] if known is not None else [name for name in _NEEDED if getattr(entry, name) is None]
        problems += [_missing(document, source, at, entry.name, name) for name in missing]
        if not missing:
            found[entry.name] = _merged(known or _unknown(entry.name), entry)
    if problems:
        raise SpecError(problems, _SUBJECT)
    return tuple(found.values())


def _missing(document: Document, source: str, at: int, gpu: str, field: str) -> Problem:
    place = document.values.get(("gpus", at))
    return Problem(
        source,
        place.line if place else 0,
        place.column if place else 0,
        field=f"gpus[{at}].{field}",
        found="nothing",
        expected=f"a number, because {gpu} is not in the catalogue",
    )


def _unknown(name: str) -> OfferedGpu:
    gpu = Gpu(name, rf"\b{re.escape(name)}\b", 0, 0.0, 0.0, 0.0, 0.0, 0, 0.0, (0, 0), "")
    return OfferedGpu(gpu, UNKNOWN)


def _merged(known: OfferedGpu, entry: CatalogueEntry) -> OfferedGpu:
    gpu = _changed(
        known.gpu,
        memory_bytes=None if entry.memory_gib is None else int(entry.memory_gib * GIB),
        bytes_per_s=_times(entry.bandwidth_tb_per_s, 1e12),
        half=_times(entry.half_tflops, 1e12),
        single=_times(entry.single_tflops, 1e12),
        fp8=_times(entry.fp8_tflops, 1e12),
        watts=entry.watts,
        nvlink_bytes_per_s=_times(entry.nvlink_gb_per_s, 1e9),
    )
    gpu = gpu if gpu.single else replace(gpu, single=gpu.half / 2)
    priced = entry.dollars_per_hour is not None
    offer = _changed(
        known.offer,
        dollars_per_hour=entry.dollars_per_hour,
        source=entry.source or ("the catalogue file" if priced else None),
        date=entry.date or ("undated" if priced else None),
        per_node=entry.per_node,
        nvlink_gpus=entry.nvlink_gpus,
        pcie_bytes_per_s=_times(entry.pcie_gb_per_s, 1e9),
    )
    if gpu.nvlink_bytes_per_s and not known.gpu.memory_bytes and entry.nvlink_gpus is None:
        offer = replace(offer, nvlink_gpus=offer.per_node)
    return OfferedGpu(gpu, offer)


def _times(value: float | None, unit: float) -> float | None:
    return None if value is None else value * unit


def _changed(value: Any, **changes: object) -> Any:
    """Return `value` with those changes that are not None."""
    return replace(value, **{name: new for name, new in changes.items() if new is not None})
