"""The fractions of nominal rates that an engine reaches, and its fixed costs: published, or measured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Coefficients:
    """How an engine on its hardware differs from nominal rates. Fractions: `arithmetic` of the peak in linear
    layers, `attention` of the peak in the attention of prompts, `bandwidth` of the memory, `link` of links
    between devices. Seconds: `step_s` for each step, `mixed_s` more for one that computes prompts beside
    streams, `stream_s` for each stream in a step and `prompt_s` for each prompt, `request_s` for each request
    before its first step, or `busy_request_s` if that is not 0 and the processors that prepare it compute a
    step as well, `collective_s` for each exchange between devices. While another engine computes on the same
    device, a step is longer by the fraction `shared`.

    The defaults hold for GPUs without measurements. Large prefills reach about half of the peak (Pope et al.,
    Efficiently Scaling Transformer Inference, 2022, report 0.4 to 0.76), decode steps 0.6 to 0.8 of the
    bandwidth (Databricks, LLM Inference Performance Engineering, 2023). `source` says where they come from:
    `data sheet`, or the profile that `kvasir calibrate` wrote."""

    arithmetic: float = 0.5
    attention: float = 0.35
    bandwidth: float = 0.7
    link: float = 0.7
    step_s: float = 0.002
    mixed_s: float = 0.0
    stream_s: float = 2e-5
    prompt_s: float = 2e-5
    request_s: float = 0.005
    busy_request_s: float = 0.0
    collective_s: float = 1e-5
    shared: float = 0.0
    source: str = "data sheet"


DATA_SHEET = Coefficients()
NOMINAL = Coefficients(
    arithmetic=1.0,
    attention=1.0,
    bandwidth=1.0,
    link=1.0,
    step_s=0.0,
    stream_s=0.0,
    prompt_s=0.0,
    request_s=0.0,
    collective_s=0.0,
    source="nominal rates",
)
"""No losses and no fixed costs: the roofline itself."""
