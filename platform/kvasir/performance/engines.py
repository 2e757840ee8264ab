"""Puts an engine's model together from what is known of it: files of the model, or a worker's identity."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from kvasir.core.identity import Hardware, KvLayout, WorkerIdentity
from kvasir.core.model.work import ModelWork
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


def device_of_worker(hardware: Hardware) -> Device:
    """Return the device of a worker: the catalogue's, or one with the rates that the worker reports for its
    model's data type, or with reference rates if it reports none."""
    gpu = gpu_of_device(hardware.device)
    if gpu is not None:
        return device_of(gpu)
    device = reference_device(hardware.device)
    if min(hardware.flops, hardware.bytes_per_s) <= 0:
        return device
    return replace(device, half=hardware.flops, single=hardware.flops, bytes_per_s=hardware.bytes_per_s)


def engine_of(identity: WorkerIdentity, coefficients: Coefficients = DATA_SHEET) -> EngineModel | None:
    """Return the model of a worker that serves, from its identity; None if it does not report its size."""
    return engine_of_sizes(
        EngineSizes(
            hardware=identity.hardware,
            kv=identity.kv,
            parameters=identity.model_parameters,
            model_bytes=identity.model_bytes,
            work=identity.work,
            max_model_len=identity.max_model_len,
        ),
        coefficients,
    )


@dataclass(frozen=True, slots=True)
class EngineSizes:
    """What a worker reports of itself: see WorkerIdentity. Without `work`, all parameters count as used by
    every token."""

    hardware: Hardware
    kv: KvLayout
    parameters: int
    model_bytes: int
    work: ModelWork | None
    max_model_len: int
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 64


def engine_of_sizes(sizes: EngineSizes, coefficients: Coefficients = DATA_SHEET) -> EngineModel | None:
    """Return the model of an engine of these sizes; None if they lack those of the model."""
    kv = sizes.kv
    if min(sizes.parameters, sizes.model_bytes, kv.layers, kv.bytes_per_block) <= 0:
        return None
    element = 4 if kv.dtype == "float32" else 1 if "8" in kv.dtype else 2
    shape = EngineShape(
        max_model_len=sizes.max_model_len,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        max_num_seqs=sizes.max_num_seqs,
        block_size=kv.block_size,
        tensor=max(1, sizes.hardware.devices),
        dtype="float32" if element == 4 else "auto",
        kv_dtype="fp8" if element == 1 else "auto",
    )
    return EngineModel(
        sizes.work or _assumed(sizes, element),
        device_of_worker(sizes.hardware),
        shape,
        weight_bytes=sizes.model_bytes / sizes.parameters,
        compute_dtype="float32" if kv.dtype == "float32" else "bfloat16",
        coefficients=coefficients,
    )


def _assumed(sizes: EngineSizes, element: int) -> ModelWork:
    kv = sizes.kv
    # A transformer layer has about 12 h^2 parameters.
    hidden = math.sqrt(sizes.parameters / (12.0 * kv.layers))
    elements = kv.bytes_per_block * kv.tensor_parallel_size / kv.block_size / element / kv.layers
    return dense_work(parameters=sizes.parameters, layers=kv.layers, hidden=hidden, kv_elements=elements)
