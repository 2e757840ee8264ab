"""Measurements of this machine: values, so that every check can be tested without such a machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from kvasir.checkpoint.model_config import ModelConfig
from kvasir.config.checks.cpu_kernels import CpuKind
from kvasir.config.spec.deployment import Deployment, PoolSpec
from kvasir.sizing.weights import WeightPart
from kvasir_platform.cluster.preflight.kubernetes import KubernetesProbe
from kvasir_platform.cluster.preflight.tiers import BucketProbe, TierProbe

DraftName = tuple[str, str]
"""Folder or id of a draft model or head, and its revision."""


def draft_name(pool: PoolSpec) -> DraftName | None:
    """Return what `pool` names to propose tokens, None without."""
    speculative = pool.engine.speculative if pool.engine.kind == "vllm" else None
    if speculative is None or speculative.model is None:
        return None
    return speculative.model, speculative.revision


@dataclass(frozen=True, slots=True)
class ModelProbe:
    """The files in the model's folder. `problem` is why they cannot be used ("" if they can),
    `weights_problem` why the weights cannot, `tokenizer_problem` why tokenizer.json cannot, and `mismatch`
    how weights and configuration differ. `weight_bytes` is the size of all tensors as stored, and
    `weights` what ranks divide; `predictors` is the same of what only speculation loads. `config` is there
    unless there is a problem; `files` are the names in the folder.

    `to_download` means that a start has to download them first: `download_bytes` to the folder `cache`, which
    has `cache_free` bytes free. `folder` is then the model's id, and there is no `config` if the Hub could
    not be asked, for the reason in `unknown`."""

    folder: str = ""
    problem: str = ""
    weights_problem: str = ""
    tokenizer_problem: str = ""
    mismatch: str = ""
    to_download: bool = False
    offline: bool = False
    unknown: str = ""
    download_bytes: int = 0
    cache: str = ""
    cache_free: int = 0
    weight_bytes: int = 0
    weights: tuple[WeightPart, ...] = ()
    predictors: tuple[WeightPart, ...] = ()
    config: ModelConfig | None = None
    files: frozenset[str] = frozenset()


class KnownModels(Protocol):
    """What is known of the models of a deployment."""

    def model_of(self, view: Deployment) -> ModelProbe:
        """The files of a view's model."""
        ...

    def draft_of(self, pool: PoolSpec) -> ModelProbe | None:
        """The files of the draft model or head that a pool names, None if it names none."""
        ...


@dataclass(frozen=True, slots=True)
class ProbedModels:
    """The models of a deployment by name, and drafts by the name and revision in the spec, apart from any
    machine."""

    by_name: Mapping[str, ModelProbe]
    drafts: Mapping[DraftName, ModelProbe] = field(default_factory=dict)

    def model_of(self, view: Deployment) -> ModelProbe:
        """See KnownModels."""
        return self.by_name[view.model.name]

    def draft_of(self, pool: PoolSpec) -> ModelProbe | None:
        """See KnownModels."""
        name = draft_name(pool)
        return None if name is None else self.drafts.get(name)


@dataclass(frozen=True, slots=True)
class PortProbe:
    """Whether the gateway's port can be bound. `holder` describes the process that uses it, "" if unknown."""

    free: bool = True
    error: str = ""
    holder: str = ""


@dataclass(frozen=True, slots=True)
class FileProbe:
    """A file or folder that `field` of the spec names. `problem` is why it cannot be used, "" if it can;
    `warning` is what needs attention soon, and `remedy` what to do, "" for what its field suggests."""

    field: str
    path: str
    problem: str = ""
    warning: str = ""
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """The machine's properties that a deployment depends on. Sizes in bytes; `memory_limit` names what bounds
    the available memory. `model` is the deployment's first, and `further_models` are the others by name,
    `drafts` the models and heads that propose tokens.
    `installed` and `pinned` map distributions to versions, the latter as this release of Kvasir requires
    them; `modules` are those of the Python modules with kernels that are installed; `cpu` is the CPU's kind.
    `gpu_devices` are the names of GPUs, "" for one whose name is unknown. `limits_problem` is why the Redis
    of rate limits cannot be reached. `rdma`: there is an RDMA device with an active port. `cannot_sign` is
    why connections between the nodes of an engine cannot be signed, and what to do."""

    system: str
    cpus: float
    memory_available: int
    memory_limit: str
    shm_free: int | None
    shm_writable: bool
    open_files: int
    gpus: int = 0
    gpu_devices: tuple[str, ...] = ()
    port: PortProbe = PortProbe()
    model: ModelProbe = ModelProbe()
    further_models: dict[str, ModelProbe] = field(default_factory=dict)
    drafts: dict[DraftName, ModelProbe] = field(default_factory=dict)
    installed: dict[str, str] = field(default_factory=dict)
    pinned: dict[str, str] = field(default_factory=dict)
    modules: frozenset[str] = frozenset()
    cpu: CpuKind = CpuKind()
    native: bool = True
    named_files: tuple[FileProbe, ...] = ()
    tiers: TierProbe = TierProbe()
    bucket: BucketProbe = BucketProbe()
    limits_problem: str = ""
    rdma: bool = False
    cannot_sign: tuple[str, str] | None = None
    kubernetes: KubernetesProbe | None = None

    def model_of(self, view: Deployment) -> ModelProbe:
        """The files of a view's model."""
        return self.further_models.get(view.model.name, self.model)

    def draft_of(self, pool: PoolSpec) -> ModelProbe | None:
        """See KnownModels."""
        name = draft_name(pool)
        return None if name is None else self.drafts.get(name)
