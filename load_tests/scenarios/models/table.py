"""docs/MODELS.md from the cells of all models that were run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.kit.models.architectures import MODELS

from load_tests.scenarios.models.results import COLUMNS, Cell

PAGE = Path(__file__).resolve().parents[3] / "docs" / "MODELS.md"

_HEAD = """# Models

Made by `make bench-models`; do not edit. Each row is a model of that architecture with random weights: four
layers, hidden size 256, vocabulary 4,096, on vLLM 0.32 for CPUs ({machine}). Windows and chunks of attention
have 128 or 256 tokens. Cells compare greedy tokens of ten prompts of 33 to 2,000 tokens with those of vLLM
alone, in 32 bits (quantized weights: bfloat16). A row says how KV and tokens are handled, and nothing about
the quality of a model.

- *plain vLLM*: vLLM alone runs the model on a CPU.
- *aggregated*: one Kvasir engine gives the same tokens, and finds the prompt in its prefix cache the second
  time.
- *disaggregated*: KV is handed from a prefill to a decode engine over NIXL, with the same tokens.
- *tiers*: KV comes back from host memory after the device's cache was emptied, with the same tokens.
- *LoRA*: the same with an adapter. Empty: no adapter was made for this model.
- *`kvasir up`*: started with defaults and `--set model.source=FOLDER`: a chat, then a prompt of 2,000 tokens
  twice with a prefix hit.
- *tools*: a forced tool call there has valid arguments.

`yes`: as described. `partly`: see the note. `no`: does not work, see the note. `not moved`: the model's KV
cannot be moved, and `kvasir up` serves it on one worker. Empty: not run, or without meaning for this model.
Not in the table are weights that vLLM computes on CPUs with AMX only, which this machine has not: MXFP4, FP8
with a scale for each block or tensor, and experts in INT4 or INT8. `kvasir check` refuses them there. It also
refuses linear layers in INT4 (llama-awq, llama-gptq, llama-w4a16) and KV in FP8 on CPUs without AVX-512.
"""


def write_page(results: Mapping[str, Mapping[str, Cell]], machine: str) -> Path:
    """Write the page and return its path."""
    known = [model for model in MODELS if model.name in results]
    lines = [_HEAD.format(machine=machine), _row(["model", "architecture", *COLUMNS])]
    lines.append(_row(["---"] * (len(COLUMNS) + 2)))
    notes: list[str] = []
    for model in known:
        cells = results[model.name]
        lines.append(_row([model.name, f"`{model.architecture}`", *_shown(cells)]))
        notes += [f"- {model.name}: {model.remark}"] if model.remark else []
        notes += [f"- {model.name}, {column}: {cell.note}" for column, cell in cells.items() if cell.note]
    PAGE.write_text("\n".join([*lines, "", "## Notes", "", *notes]) + "\n", encoding="utf-8")
    return PAGE


def _shown(cells: Mapping[str, Cell]) -> list[str]:
    return [cells[column].verdict if column in cells else "" for column in COLUMNS]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
