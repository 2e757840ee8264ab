"""Which hardware, decided in stages: does it fit, is it fast enough, do links suffice, what does it cost."""

from __future__ import annotations

from dataclasses import dataclass

from kvasir.performance.step import PromptChunk, StepWork
from kvasir_platform.capacity.analysis.memory import smallest
from kvasir_platform.capacity.engines import EngineOption, HardwareChoice
from kvasir_platform.capacity.pools import SizedEngine
from kvasir_platform.capacity.search import CapacityPlan, PlanRequest, SearchResult

_MOST_COMMUNICATION = 0.25
"""Of a decode step: above it, more ranks mostly wait for each other."""
_GB = 1e9


@dataclass(frozen=True, slots=True)
class Stage:
    """One question and its answer; `passed` is None if it was not asked."""

    question: str
    passed: bool | None
    answer: str


@dataclass(frozen=True, slots=True)
class HardwareAdvice:
    """The stages of one kind of hardware, and the cheapest plan with it alone, None if there is none."""

    hardware: HardwareChoice
    stages: tuple[Stage, ...]
    plan: CapacityPlan | None

    @property
    def bandwidth_per_dollar(self) -> float | None:
        """Bytes of memory bandwidth for a dollar, None without a price."""
        price = self.hardware.price
        return self.hardware.device.bytes_per_s * 3600 / price if price else None

    @property
    def verdict(self) -> str:
        """What decides."""
        failed = next((stage for stage in self.stages if stage.passed is False), None)
        if failed is not None:
            return f"no: {failed.question}"
        return "yes" if self.plan is not None else "no: the SLO at this load"


_QUESTIONS = ("fits?", "bandwidth?", "compute?", "interconnect?", "price?")


def hardware_advice(result: SearchResult) -> tuple[HardwareAdvice, ...]:
    """Return the advice for each kind of hardware."""
    return tuple(_advise(result, hardware) for hardware in result.request.hardware)


def _advise(result: SearchResult, hardware: HardwareChoice) -> HardwareAdvice:
    request = result.request
    plan = next((each for each in result.plans if set(each.hardware) == {hardware.name}), None)
    option = smallest(request, hardware)
    if option is None:
        answer = "no layout fits"
        count = hardware.count
        answer += f" on the {count} there are" if count is not None else ""
        rest = tuple(Stage(question, None, "-") for question in _QUESTIONS[1:])
        return HardwareAdvice(hardware, (Stage(_QUESTIONS[0], False, answer), *rest), None)
    # The layout that is bought, if there is one, else the fastest of those that fit.
    chosen = plan.pools[-1].engine.option if plan is not None else _fastest(result, hardware, option)
    first = plan.pools[0].engine.option if plan is not None else chosen
    stages = (
        Stage(_QUESTIONS[0], True, f"{option.title}: {option.fit.weights / 2**30:.1f} GiB of weights each"),
        _bandwidth(chosen, request),
        _compute(first, request),
        _interconnect(chosen, request, plan),
        _price(hardware, plan),
    )
    return HardwareAdvice(hardware, stages, plan)


def _fastest(result: SearchResult, hardware: HardwareChoice, option: EngineOption) -> EngineOption:
    context = result.request.traffic.context
    fitting = [each for each in result.options if each.hardware.name == hardware.name]
    return min(fitting, key=lambda each: each.engine.decode(1, context).seconds, default=option)


def _bandwidth(option: EngineOption, request: PlanRequest) -> Stage:
    question = _QUESTIONS[1]
    if request.traffic.embeds:
        return Stage(question, True, "embeddings read weights once for each batch")
    engine = option.engine
    step = engine.decode(1, request.traffic.context)
    device = engine.device
    rate = option.shape.ranks * device.bytes_per_s * engine.coefficients.bandwidth
    answer = (
        f"one stream: {step.memory_s * rate / _GB:,.1f} GB a step at {rate / _GB:,.0f} GB/s, "
        f"{step.seconds * 1e3:.1f} ms against {request.target.itl_s * 1e3:.0f} ms"
    )
    return Stage(question, step.seconds <= request.target.itl_s, answer)


def _compute(option: EngineOption, request: PlanRequest) -> Stage:
    traffic = request.traffic
    seconds = option.engine.prefill_s(round(traffic.prompt), round(traffic.cached))
    answer = (
        f"{traffic.computed:,.0f} prompt tokens in {seconds * 1e3:.0f} ms against "
        f"{request.target.ttft_s * 1e3:.0f} ms"
    )
    return Stage(_QUESTIONS[2], seconds <= request.target.ttft_s, answer)


def _interconnect(option: EngineOption, request: PlanRequest, plan: CapacityPlan | None) -> Stage:
    question = _QUESTIONS[3]
    if option.shape.ranks == 1:
        return Stage(question, True, "one device: nothing to exchange")
    streams = max(1, round(plan.peak.streams)) if plan is not None else 1
    if request.traffic.embeds:
        chunk = PromptChunk(round(request.traffic.computed))
        step = option.engine.step(StepWork((chunk,)))
    else:
        step = option.engine.decode(streams, request.traffic.context)
    part = step.communication_s / step.seconds
    link = option.hardware.link_name(option.shape.tensor * option.shape.data)
    answer = f"{option.layout} over {link}: {part:.0%} of a step"
    return Stage(question, part <= _MOST_COMMUNICATION, answer)


def _price(hardware: HardwareChoice, plan: CapacityPlan | None) -> Stage:
    if not hardware.price:
        return Stage(_QUESTIONS[4], plan is not None, "no price known")
    per_dollar = hardware.device.bytes_per_s * 3600 / hardware.price / 1e15
    answer = f"{per_dollar:.1f} PB of bandwidth per dollar"
    if plan is None:
        return Stage(_QUESTIONS[4], None, answer)
    return Stage(_QUESTIONS[4], True, f"${plan.dollars_per_hour:,.2f}/h at the peak, {answer}")


def why_layout(engine: SizedEngine, streams: float) -> str:
    """Return why an engine has its layout, with the bytes of an all-reduce."""
    option, shape = engine.option, engine.option.shape
    work = option.engine.work
    if shape.ranks == 1:
        return "weights and KV fit on one device, and it exchanges nothing with others"
    step = option.engine.decode(max(1, round(streams)), engine.traffic.context)
    part = step.communication_s / step.seconds
    if shape.tensor > 1:
        moved = 2 * work.layers * work.hidden * 2 * 2 * (shape.tensor - 1) / shape.tensor
        reason = (
            f"{shape.tensor} ranks read a part of the weights each; two all-reduces in each of {work.layers} "
            f"layers move {moved / 1e6:.2f} MB per token over {option.hardware.link_name(shape.tensor)}, "
            f"{part:.0%} of a decode step"
        )
    elif shape.pipeline > 1:
        reason = (
            f"{shape.pipeline} stages hand {work.hidden * 2 / 1e3:.0f} KB per token to the next, which needs "
            "no NVLink; a token passes all of them, so that it is no faster than with one"
        )
    else:
        reason = f"{shape.data} ranks have attention each and share the experts"
    if shape.expert_parallel:
        reason += (
            f"; experts whole on {shape.tensor * shape.data} ranks, two all-to-alls in each layer of them"
        )
    return reason
