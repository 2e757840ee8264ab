"""Runs tiny models of many architectures on real engines, and writes docs/MODELS.md.

    make bench-models ARGS="--only gemma3,gpt-oss"

Each model runs in processes of its own, one after the other. Results are kept in build/models and are not
repeated until they are removed, or with `--again`. The page and the report get all that are kept there, and
keep their cells for what is not.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from tests.kit.models.architectures import MODELS, TinyModel, named
from tests.kit.models.maker import make_adapter, make_model

from kvasir.checkpoint.kv_movement import kv_movement
from kvasir.checkpoint.model_config import read_model_config
from load_tests.report import REPORTS, machine, read, this_run, write
from load_tests.scenarios.models.engines import MARK, Generated
from load_tests.scenarios.models.kept import Cells, all_cells, keep, kept_file, to_rows
from load_tests.scenarios.models.results import Cell, equal_tokens, moved, served_again, together
from load_tests.scenarios.models.served import serve
from load_tests.scenarios.models.table import write_page

_KEPT = Path("build") / "models"
_RUN_S = 300
_CAUSE_CHARACTERS = 300


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="names of models, separated by commas")
    parser.add_argument("--parts", default="engines,up", help="engines, up, or both")
    parser.add_argument("--again", action="store_true", help="repeat what is kept")
    options = parser.parse_args()
    chosen = [named(name) for name in options.only.split(",") if name] or list(MODELS)
    for model in chosen:
        for part in options.parts.split(","):
            if options.again or not kept_file(_KEPT, model.name, part).exists():
                print(f"{model.name}: {part}", flush=True)
                cells = _on_engines(model) if part == "engines" else _under_up(model)
                keep(_KEPT, model.name, part, cells, this_run())
        _report()


def _on_engines(model: TinyModel) -> Cells:
    if model.kind != "generates":
        return {}
    plain = _run("plain", model)
    if isinstance(plain, str):
        return {"plain vLLM": Cell("no", plain)}
    obstacle = kv_movement(read_model_config(_folder(model))).obstacle
    whole = _run("whole", model)
    cells = {"plain vLLM": Cell("yes"), "aggregated": _same(plain, whole, model.block)}
    adapted = [_adapted(plain, whole)]
    for column, mode, where in (
        ("disaggregated", "apart", "the prefill engine"),
        ("tiers", "tiers", "the tier"),
    ):
        if obstacle:
            cells[column] = Cell("not moved", obstacle)
            continue
        made = _run(mode, model)
        cells[column] = _same(plain, made, model.block)
        if isinstance(made, Generated):
            cells[column] = moved(made, cells[column], where)
        adapted.append(_adapted(plain, made))
    if model.adapts:
        cells["LoRA"] = together(adapted)
    return cells


def _same(plain: Generated, made: Generated | str, block: int) -> Cell:
    if isinstance(made, str):
        return Cell("no", made)
    return served_again(plain, made, equal_tokens(plain, made), block)


def _adapted(plain: Generated, made: Generated | str) -> Cell:
    return Cell("no", made) if isinstance(made, str) else equal_tokens(plain, made, "adapted")


def _under_up(model: TinyModel) -> Cells:
    folder = _folder(model)
    served = serve(model, folder)
    # The report is read elsewhere.
    up = replace(served.up, note=served.up.note.replace(f"{folder.parent}/", ""))
    return {"kvasir up": up, **({} if served.tools is None else {"tools": served.tools})}


def _run(mode: str, model: TinyModel) -> Generated | str:
    """Run one mode in a process of its own; return what it generated, or why it failed."""
    command = [sys.executable, "-m", "load_tests.scenarios.models.engines", mode, model.name]
    command += [str(_folder(model)), str(_adapter(model))]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_RUN_S, check=False, env={**os.environ}
        )
    except subprocess.TimeoutExpired:
        return f"not done in {_RUN_S} s"
    for line in done.stdout.splitlines():
        if line.startswith(MARK):
            made = json.loads(line.removeprefix(MARK))
            made["logprobs"] = [
                [{int(token): value for token, value in at.items()} for at in each]
                for each in made["logprobs"]
            ]
            return Generated(**made)
    return _cause(done.stderr)


def _cause(stderr: str) -> str:
    """Return the first error in what a process wrote: later ones only follow from it."""
    lines = [line.strip() for line in stderr.splitlines() if " raise " not in line]
    errors = [line for line in lines if "Error: " in line or "Error(" in line]
    named_causes = [line[line.find(") ") + 2 :] if line.startswith("(") else line for line in errors]
    return (named_causes or [stderr.strip()[-_CAUSE_CHARACTERS:]])[0][:_CAUSE_CHARACTERS]


def _folder(model: TinyModel) -> Path:
    return make_model(model, (_KEPT / "folders" / model.name).absolute())


def _adapter(model: TinyModel) -> Path:
    folder = (_KEPT / "folders" / f"{model.name}-lora").absolute()
    return make_adapter(model, folder) if model.adapts else folder


def _report() -> None:
    cells = all_cells(_KEPT, read(REPORTS / "models.json"))
    write("models", "make bench-models", to_rows(cells))
    results: dict[str, Cells] = {}
    for each in cells:
        results.setdefault(each.model, {})[each.column] = each.cell
    write_page(results, machine())


if __name__ == "__main__":
    main()
