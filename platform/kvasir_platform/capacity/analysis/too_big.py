"""What to change if a model fits on none of the hardware: its precision, or the hardware."""

from __future__ import annotations

from collections.abc import Iterator

from kvasir.hardware.offers import catalogue
from kvasir_platform.capacity.engines import EngineOption, PrecisionChoice, engine_options, gpu_choice
from kvasir_platform.capacity.precisions import computes_int8, eight_bits
from kvasir_platform.capacity.search import PlanRequest

_MOST_NAMES = 3


def remedies_for(request: PlanRequest) -> Iterator[str]:
    """Yield changes with which the model fits, each computed; nothing if there is none."""
    plain = request.precisions[0]
    if plain.quantization == "none":
        option = _least(request, plain.kv_dtype)
        if option is not None:
            yield f"with --quantization {option.shape.quantization} it fits on {option.title}"
    unlimited = [
        (option.dollars_per_hour, option.title)
        for each in catalogue()
        if each.offer.dollars_per_hour is not None
        and (option := _smallest_on(request, each.name, plain)) is not None
    ]
    if unlimited:
        names = "; ".join(title for _, title in sorted(unlimited)[:_MOST_NAMES])
        yield f"as it is, it fits on {names}"


def _least(request: PlanRequest, kv_dtype: str) -> EngineOption | None:
    fitting = [
        option
        for hardware in request.hardware
        if (quantization := eight_bits(request.model, hardware)) is not None
        for option in engine_options(
            request.model,
            hardware,
            max_model_len=request.max_model_len,
            precision=PrecisionChoice(quantization, kv_dtype),
            chunk=2048,
        )
    ]
    return min(fitting, key=lambda option: option.devices, default=None)


def _smallest_on(request: PlanRequest, name: str, precision: PrecisionChoice) -> EngineOption | None:
    (offered,) = (each for each in catalogue() if each.name == name)
    hardware = gpu_choice(offered)
    if precision.quantization == "int8" and not computes_int8(hardware):
        return None
    options = engine_options(
        request.model,
        hardware,
        max_model_len=request.max_model_len,
        precision=precision,
        chunk=2048,
    )
    return min(options, key=lambda option: option.devices, default=None)
