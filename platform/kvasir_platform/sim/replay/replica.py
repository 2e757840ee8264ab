"""The rates and memory of a simulated replica, and the hardware from which they follow.

The default is the test bed that the trace was published with (Mooncake, FAST 2025, section 5): a dummy model
of the architecture of LLaMA2-70B on a node of eight A800-80G, one replica per node. Rates follow from peak
figures of the data sheet and the fractions of them that engines reach.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvasir.core.identity import Hardware, KvLayout, WorkerIdentity
from kvasir.core.requests import Role, SloClass
from kvasir_platform.workload.files import TRACE_BLOCK_TOKENS

MODEL = "replay"


@dataclass(frozen=True, slots=True)
class SimReplica:
    """Times in seconds. A step lasts `step_fixed_s + step_stream_s * streams + step_kv_token_s * tokens of
    KV that the streams read`; computing prompt token number k of a request adds `prefill_token_s +
    prefill_context_s * k`. A step holds `step_tokens`, of streams and prompts together. Memory in blocks of
    TRACE_BLOCK_TOKENS: `device_blocks`, and `cpu_blocks` below it, read at `cpu_byte_s`."""

    hardware: Hardware
    model_parameters: int
    model_bytes: int
    layers: int
    kv_heads: int
    head_size: int
    prefill_token_s: float
    prefill_context_s: float
    step_fixed_s: float
    step_stream_s: float
    step_kv_token_s: float
    step_tokens: int
    most_streams: int
    device_blocks: int
    cpu_blocks: int
    cpu_byte_s: float
    transfer_fixed_s: float
    transfer_byte_s: float

    @property
    def kv_token_bytes(self) -> int:
        """Bytes per token, keys and values in 16 bits, over all layers and shards."""
        return 2 * self.layers * self.kv_heads * self.head_size * 2

    def unloaded_ttft_s(self, prompt_tokens: int) -> float:
        """Seconds to the first token of a prompt without cached tokens, on an idle replica."""
        steps = prompt_tokens / self.step_tokens
        attention = self.prefill_context_s * prompt_tokens**2 / 2
        return prompt_tokens * self.prefill_token_s + attention + steps * self.step_fixed_s

    def unloaded_itl_s(self, context_tokens: float) -> float:
        """Seconds between two tokens of a stream that runs alone."""
        return self.step_fixed_s + self.step_stream_s + self.step_kv_token_s * context_tokens

    def identity(self, worker_id: str, role: Role) -> WorkerIdentity:
        """The hardware that such a worker reports."""
        shards = self.hardware.devices
        layout = KvLayout(
            block_size=TRACE_BLOCK_TOKENS,
            dtype="bfloat16",
            layout="layers,blocks,kv_heads,tokens,head",
            layers=self.layers,
            kv_heads=self.kv_heads,
            head_size=self.head_size,
            bytes_per_block=self.kv_token_bytes * TRACE_BLOCK_TOKENS // shards,
            tensor_parallel_size=shards,
        )
        return WorkerIdentity(
            worker_id=worker_id,
            epoch=1,
            pool=role.value,
            role=role,
            model=MODEL,
            revision="",
            tokenizer_digest="",
            max_model_len=self.device_blocks * TRACE_BLOCK_TOKENS,
            kv=layout,
            kv_blocks=self.device_blocks,
            engine="simulated",
            engine_version="1",
            transfer="simulated",
            reports_kv=True,
            hardware=self.hardware,
            model_parameters=self.model_parameters,
            model_bytes=self.model_bytes,
        )


def promise(replica: SimReplica, prompt_tokens: int) -> SloClass:
    """The SLO of the Mooncake paper (section 8.1): ten times the TTFT and five times the ITL that a request
    of typical length has on an idle replica."""
    ttft_s = 10 * replica.unloaded_ttft_s(prompt_tokens)
    return SloClass("replay", ttft_s=ttft_s, itl_s=5 * replica.unloaded_itl_s(prompt_tokens))


def a800_node(*, device_share: float = 1.0, cpu_bytes: float = 1.6e12) -> SimReplica:
    """LLaMA2-70B on eight A800-80G with 2 TB of memory, of which `cpu_bytes` hold KV; `device_share` of the
    KV memory on the devices.

    A800-80G (NVIDIA's data sheet): 312 TFLOPS in 16 bits, 2.04 TB/s. Engines reach about half of the former
    in prefill (Agrawal et al., Sarathi-Serve, OSDI 2024: figures 4 and 13 imply 45 to 60 %) and 80 % of the
    latter; all-reduces and launches of eighty layers add 5 ms to a step. `step_tokens` is vLLM's
    `max_num_batched_tokens` on this class. PCIe 4.0 with eight links gives 8 x 20 GB/s to CPU memory, and
    eight 100 Gb/s links between nodes (the Mooncake paper's 800 Gb/s) 80 % of 100 GB/s.
    """
    devices, flops, bandwidth = 8, 312e12, 2.039e12
    parameters, layers, hidden, kv_heads, head = 68_976_648_192, 80, 8192, 8, 128
    reached_flops, reached_bandwidth = 0.5 * devices * flops, 0.8 * devices * bandwidth
    kv_token = 2 * layers * kv_heads * head * 2
    weights = 2 * parameters
    kv_bytes = devices * 80e9 * 0.9 - weights
    block = kv_token * TRACE_BLOCK_TOKENS
    return SimReplica(
        hardware=Hardware("A800-SXM4-80GB", devices, flops, bandwidth),
        model_parameters=parameters,
        model_bytes=weights,
        layers=layers,
        kv_heads=kv_heads,
        head_size=head,
        prefill_token_s=2 * parameters / reached_flops,
        prefill_context_s=4 * hidden * layers / reached_flops,
        step_fixed_s=weights / reached_bandwidth + 0.005,
        step_stream_s=5e-5,
        step_kv_token_s=kv_token / reached_bandwidth,
        step_tokens=2048,
        most_streams=256,
        device_blocks=int(device_share * kv_bytes / block),
        cpu_blocks=int(cpu_bytes / block),
        cpu_byte_s=1 / 160e9,
        transfer_fixed_s=0.005,
        transfer_byte_s=1 / 80e9,
    )
