"""Puts an engine's model together from what is known of it: files of the model, or a worker's identity."""

from __future__ import annotations

import math

from kvasir.core.identity import WorkerIdentity
from kvasir.hardware.gpus import gpu_of_device
from kvasir.performance.coefficients import DATA_SHEET, Coefficients
from kvasir.performance.device import Device, device_of, reference_device
from kvasir.performance.precision import precision_of
from kvasir.performance.step import EngineModel
from kvasir.performance.work import dense_work, model_work
from kvasir.sizing.fit import ModelFiles
from kvasir.sizing.shape import EngineShape


def engine_model(
    files: ModelFiles, device: Device, shape: EngineShape, coefficients: Coefficients = DATA_SHEET
) -> EngineModel:
    """Return the model of an engine of `shape` that serves `files` on `device`."""
    work = model_work(files.config)
    found = precision_of(files.config, work, shape, device, files.weights)
    return EngineModel(
        work,
        device,
        shape,
        weight_bytes=found.weight_bytes,
        compute_dtype=found.compute_dtype,
        coefficients=coefficients,
        expert_bytes=found.expert_bytes,
    )


def device_named(name: str) -> Device:
    """Return the device that its driver calls `name`, with reference rates if it is not in the catalogue."""
    gpu = gpu_of_device(name)
    return reference_device(name) if gpu is None else device_of(gpu)


def engine_of(
    identity: WorkerIdentity, coefficients: Coefficients = DATA_SHEET, *, batched_tokens: int = 2048
) -> EngineModel | None:
    """Return the model of a worker that serves, from the sizes in its identity; None if it reports none. All
    of its parameters count as used by every token."""
    kv, parameters = identity.kv, identity.model_parameters
    if min(parameters, identity.model_bytes, kv.layers, kv.bytes_per_block) <= 0:
        return None
    element = 4 if kv.dtype == "float32" else 1 if "8" in kv.dtype else 2
    shape = EngineShape(
        max_model_len=identity.max_model_len,
        max_num_batched_tokens=batched_tokens,
        block_size=kv.block_size,
        tensor=max(1, identity.hardware.devices),
        dtype="float32" if element == 4 else "auto",
        kv_dtype="fp8" if element == 1 else "auto",
    )
    token_elements = kv.bytes_per_block * kv.tensor_parallel_size / kv.block_size / element / kv.layers
    # A transformer layer has about 12 h^2 parameters.
    hidden = math.sqrt(parameters / (12.0 * kv.layers))
    return EngineModel(
        dense_work(parameters=parameters, layers=kv.layers, hidden=hidden, kv_elements=token_elements),
        device_named(identity.hardware.device),
        shape,
        weight_bytes=identity.model_bytes / parameters,
        compute_dtype="float32" if kv.dtype == "float32" else "bfloat16",
        coefficients=coefficients,
    )
