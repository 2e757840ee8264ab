"""The options of `kvasir sim`. Every call of `kvasir` imports this module, so it loads little."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from kvasir.core.errors import ConfigError
from kvasir_platform.cli.common.numbers import number, share, whole

SIM_EPILOG = """\
Runs a whole deployment in virtual time: the production router, admission and planner decide over engines
whose steps take what the performance model computes. Nothing is started, and no GPU is needed.

  kvasir sim             one run: percentiles, goodput, utilization, hit rate, cost
  kvasir sim compare     rank routing policies by goodput, beside what perfect routing could reach
  kvasir sim showcase    seven experiments on one page, such as static batching against continuous batching

Options belong to run and compare, unless brackets after their text name other actions. An action refuses the
options of others.

MODEL is a folder, a Hugging Face id, or a known shape such as llama-3.1-8b, llama-3.1-70b, qwen3-30b-a3b,
gpt-oss-120b or deepseek-v3. A workload is a preset with parameters (synthetic, chat, rag, agents, embeddings,
burst, diurnal), a trace, or a recording of `kvasir-workload/1`. A fault is KIND@SECONDS[:WORKER[:LASTS]] with
KIND crash, slow or drain. With -f, the model, the hardware and engines of each pool, CPU memory for KV, SLO,
admission and scaling come from a kvasir.yaml, such as `kvasir plan --write` makes, and other options replace
them. What the file has and no run plays is named on stderr. Embedding models are not simulated.

examples:
  kvasir sim --workers 4 --workload chat:rate=20,duration=120
  kvasir sim --prefill 2 --decode 2 --workload rag:rate=15 --html run.html     play the run in a browser
  kvasir sim --model llama-3.1-70b --tp 4 --workload chat:rate=10 --faults crash@30:0
  kvasir sim --workers 1 --autoscale 1:8 --workload burst:rate=10
  kvasir plan llama-3.1-8b --gpus H100,L40S --write plan && kvasir sim -f plan/kvasir.yaml
  kvasir sim -f kvasir.yaml --gpu L40S --workload traffic.jsonl:speed=2
  kvasir sim --model qwen3-8b --gpu CPU:32 --workload chat:rate=0.1
  kvasir sim compare --policies cost,round_robin,dynamo --workload rag:rate=20
  kvasir sim showcase --html showcase.html"""

ACTIONS = ("run", "compare", "showcase")
_SIMULATIONS = ("run", "compare")
# Of options that belong to other actions than run and compare.
_ACTIONS_OF = {"policy": ("run",), "policies": ("compare",), "attained": ("compare",), "html": ACTIONS}
POLICIES = "cost,round_robin,least_loaded,power_of_two,prefix,dynamo,llm_d,sglang"

_COUNT = whole(1, 1_000_000)
_LOOKAHEAD = whole(0, 16)
_SECONDS = number(0.0, 1e6)


@dataclass(frozen=True, slots=True)
class SloText:
    """The promise, in seconds."""

    ttft: float = 1.0
    itl: float = 0.05


@dataclass(frozen=True, slots=True)
class SimOption:
    """An option as it is written, its name in the namespace, its value where it is not given, and the actions
    that take it."""

    flag: str
    name: str
    default: object
    actions: tuple[str, ...]


def add_sim_options(sim: argparse.ArgumentParser) -> None:
    """Add them. A value is None where its option is not given, until `settle` fills it in."""
    sim.add_argument(
        "action", nargs="?", choices=ACTIONS, default="run", metavar="ACTION", help="run, compare or showcase"
    )
    _add_fleet(sim.add_argument_group("the fleet"))
    _add_engine(sim.add_argument_group("engines"))
    _add_traffic(sim.add_argument_group("traffic and what happens"))
    _add_output(sim.add_argument_group("results"))
    known = []
    for option in sim._actions:
        if not option.option_strings or option.default == argparse.SUPPRESS:
            continue
        actions = _ACTIONS_OF.get(option.dest, _SIMULATIONS)
        known.append(SimOption(option.option_strings[-1], option.dest, option.default, actions))
        option.default = None
        if option.dest in _ACTIONS_OF:
            option.help = f"{option.help} [{', '.join(actions)}]"
    sim.set_defaults(sim_options=tuple(known))


def settle(args: argparse.Namespace) -> None:
    """Refuse options that the action does not take, and fill in those that are not given. Raises
    ConfigError."""
    for option in args.sim_options:
        if getattr(args, option.name) is None:
            setattr(args, option.name, option.default)
        elif args.action not in option.actions:
            raise ConfigError(
                f"{option.flag} has no effect on {args.action}: leave it out; it belongs to "
                f"{' and '.join(f'`kvasir sim {each}`' for each in option.actions)}"
            )


def _add_fleet(group: argparse._ArgumentGroup) -> None:
    group.add_argument("-f", "--file", type=Path, metavar="FILE", help="take the deployment from a spec")
    group.add_argument("--model", metavar="MODEL", help="what is served (llama-3.1-8b)")
    group.add_argument("--gpu", metavar="NAME", help="a GPU of the catalogue (H100), or CPU:CORES")
    group.add_argument("--catalogue", type=Path, metavar="FILE", help="GPUs and prices of your own (YAML)")
    group.add_argument("--profile", type=Path, metavar="FILE", help="measurements of `kvasir calibrate`")
    group.add_argument("--tp", type=_ranks, metavar="N", help="GPUs of a worker: 1, 2, 4 or 8 (1)")
    group.add_argument("--workers", type=_COUNT, metavar="N", help="workers that do both parts (4)")
    group.add_argument("--prefill", type=_COUNT, metavar="N", help="workers that compute prompts")
    group.add_argument("--decode", type=_COUNT, metavar="N", help="workers that generate")
    group.add_argument("--policy", metavar="NAME", help="the routing policy (cost)")
    group.add_argument("--no-admission", action="store_true", help="send every request to a worker at once")
    group.add_argument(
        "--autoscale", type=_bounds, metavar="MIN:MAX", help="let the planner size every pool within bounds"
    )
    group.add_argument(
        "--start-s",
        type=_SECONDS,
        metavar="S",
        help="seconds until a new worker serves (60)",
    )


def _add_engine(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--batching", choices=("continuous", "static", "dynamic"), default="continuous", help="(continuous)"
    )
    group.add_argument("--batch", type=_COUNT, metavar="N", help="sequences of a batch at most (256)")
    group.add_argument(
        "--batch-wait",
        type=_SECONDS,
        default=0.1,
        metavar="S",
        help="how long dynamic batches fill (0.1)",
    )
    group.add_argument("--chunk", type=_COUNT, metavar="N", help="tokens of a step at most (8192)")
    group.add_argument("--no-chunked-prefill", action="store_true", help="compute prompts whole")
    group.add_argument("--no-prefix-cache", action="store_true", help="compute every prompt from its start")
    group.add_argument(
        "--preemption", choices=("recompute", "swap", "drop"), default="recompute", help="(recompute)"
    )
    group.add_argument(
        "--cpu-kv-gib", type=number(0, 1e5), metavar="N", help="KV of a worker in CPU memory (0)"
    )
    group.add_argument("--speculate", type=_LOOKAHEAD, metavar="N", help="proposals of a step (0)")
    group.add_argument(
        "--acceptance", type=share, default=0.7, metavar="X", help="chance that one is accepted (0.7)"
    )
    group.add_argument(
        "--draft-cost", type=share, default=0.0, metavar="X", help="of a proposal, in decode steps (0)"
    )
    group.add_argument("--quantization", choices=("none", "int8", "fp8"), help="of weights at load (none)")
    group.add_argument("--kv-dtype", choices=("auto", "fp8"), help="of KV (auto)")
    group.add_argument("--block", type=_COUNT, metavar="N", help="tokens of a KV block (64)")


def _add_traffic(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--workload", default="chat:rate=10,duration=120", metavar="TEXT", help="(chat:rate=10,duration=120)"
    )
    group.add_argument("--slo", type=_slo, metavar="KEY=S,…", help="ttft and itl (ttft=1,itl=0.05)")
    group.add_argument("--faults", action="append", default=[], metavar="FAULT,…", help="(repeatable)")
    group.add_argument("--seed", type=int, default=1, metavar="N", help="of all that is drawn (1)")


def _add_output(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--json", dest="output", action="store_const", const="json", help="the same as -o json"
    )
    group.add_argument("--html", type=Path, metavar="FILE", help="write a page of the results")
    group.add_argument("--png", type=Path, metavar="FILE", help="draw the times (needs the extra `charts`)")
    group.add_argument("--policies", default=POLICIES, metavar="NAME,…", help="to rank (all)")
    group.add_argument(
        "--attained", type=share, default=0.9, metavar="X", help="requests within the SLO (0.9)"
    )
    group.set_defaults(output=argparse.SUPPRESS)


def _ranks(text: str) -> int:
    if text not in ("1", "2", "4", "8"):
        raise argparse.ArgumentTypeError(f"{text}: 1, 2, 4 or 8")
    return int(text)


def _bounds(text: str) -> tuple[int, int]:
    least, colon, most = text.partition(":")
    if not colon or not least.isdecimal() or not most.isdecimal() or not 1 <= int(least) <= int(most):
        raise argparse.ArgumentTypeError(f"{text}: MIN:MAX, as 1:8")
    return int(least), int(most)


def _slo(text: str) -> SloText:
    found: dict[str, float] = {}
    for part in text.split(","):
        key, equals, value = part.partition("=")
        if not equals or key not in ("ttft", "itl"):
            raise argparse.ArgumentTypeError(f"{part}: ttft=SECONDS or itl=SECONDS")
        found[key] = number(1e-4, 1e4)(value)
    return SloText(**found)
