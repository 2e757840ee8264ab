"""What vLLM computes on CPUs, against what `kvasir check` says of it."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from kvasir.config.checks import cpu_kernels
from kvasir_platform.cluster.preflight.cpus import has_amx, has_avx512, is_x86

pytestmark = pytest.mark.slow


def test_vllms_kernels_of_packed_weights_and_mamba_2_on_cpus_are_those_that_the_check_knows() -> None:
    pytest.importorskip("vllm")
    import torch
    from vllm.model_executor.kernels.linear import init_mxfp4_linear_kernel, init_nvfp4_linear_kernel
    from vllm.model_executor.kernels.linear.scaled_mm.cpu import (
        CPUFp8BlockScaledMMKernel,
        CPUFp8PerTensorScaledMMLinearKernel,
    )
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import (
        CPUExpertsFp8,
        CPUExpertsInt4,
        CPUExpertsMxfp4,
    )
    from vllm.model_executor.layers.mamba.ops.cpu import mamba_ssm
    from vllm.model_executor.layers.quantization.utils.quant_utils import (
        kFp8DynamicTokenSym,
        kFp8StaticChannelSym,
    )
    from vllm.model_executor.models import registry
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    if not current_platform.is_cpu():
        pytest.skip("this vLLM is not for CPUs")
    for experts in (CPUExpertsMxfp4, CPUExpertsInt4, CPUExpertsFp8):
        assert experts._supports_current_device() == has_amx(), experts
    for linear in (CPUFp8BlockScaledMMKernel, CPUFp8PerTensorScaledMMLinearKernel):
        assert linear.is_supported()[0] == has_amx(), linear
    assert torch.cpu._is_avx512_supported() == has_avx512()
    current_platform.import_kernels()
    assert not is_x86() or hasattr(torch.ops._C, "cpu_gemm_wna16") == has_avx512()
    if not has_avx512():
        with pytest.raises(NotImplementedError, match="FP8 KV cache on CPU requires"):
            _get_attn_isa(torch.bfloat16, 32, 64, "fp8")
    assert not CPUExpertsFp8._supports_quant_scheme(kFp8StaticChannelSym, kFp8DynamicTokenSym)
    with pytest.raises(ValueError, match="Failed to find a kernel that can implement the MXFP4 linear"):
        init_mxfp4_linear_kernel()
    with pytest.raises(ValueError, match="Failed to find a kernel that can implement the NVFP4 linear"):
        init_nvfp4_linear_kernel()
    scan = inspect.getsource(mamba_ssm._mamba_chunk_scan_combined_fwd_cpu)
    # Accepted as an argument, and not used.
    assert scan.count("return_intermediate_states") == 1
    models = Path(registry.__file__).parent
    mixing = {path.stem for path in models.glob("*.py") if "MambaMixer2(" in path.read_text()}
    known = registry._TEXT_GENERATION_MODELS
    assert {name for name, (module, _) in known.items() if module in mixing} == set(cpu_kernels._MAMBA2)
