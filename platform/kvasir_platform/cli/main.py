"""The command line of `kvasir`: its options, and the dispatch to subcommands.

Every call imports this module, `--help` included, so it needs the standard library only; each subcommand
imports its dependencies when it runs.

Exit status: 0 done, 1 failed (or nothing runs), 2 the command line or kvasir.yaml is invalid; 128 and the
number of the signal if one ended the command, or ended `kvasir up` before it was ready.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from kvasir.core.errors import ConfigError, KvasirError
from kvasir_platform.cli.batch.arguments import add_batch, run_batch
from kvasir_platform.cli.bench_options import add_bench, run_bench
from kvasir_platform.cli.calibrate.arguments import add_calibrate_options
from kvasir_platform.cli.check_options import add_check_options
from kvasir_platform.cli.common.numbers import number, positive
from kvasir_platform.cli.common.output import CommandOutput
from kvasir_platform.cli.common.parsers import Add, adder
from kvasir_platform.cli.common.tls_options import add_tls_options
from kvasir_platform.cli.cost.arguments import add_cost, run_cost
from kvasir_platform.cli.help_texts import (
    CALIBRATE_EPILOG,
    CHECK_EPILOG,
    DRAIN_EPILOG,
    EXPLAIN_EPILOG,
    GET_EPILOG,
    RESTART_EPILOG,
    SCALE_EPILOG,
    TOP_EPILOG,
    UP_EPILOG,
    VERIFY_EPILOG,
)
from kvasir_platform.cli.keys_options import add_keys, run_keys
from kvasir_platform.cli.live.arguments import LIVE, add_live, run_live
from kvasir_platform.cli.lora_options import add_lora, run_lora
from kvasir_platform.cli.picker_options import add_picker, run_picker
from kvasir_platform.cli.plan.arguments import PLAN_EPILOG, add_plan_options
from kvasir_platform.cli.record.arguments import add_record, run_record
from kvasir_platform.cli.rollout_options import add_rollout, run_rollout
from kvasir_platform.cli.sim.arguments import SIM_EPILOG, add_sim_options
from kvasir_platform.cli.verify.arguments import add_verify_options

if TYPE_CHECKING:
    from kvasir_platform.cli.common.gateway_site import Site
    from kvasir_platform.cluster.local.launcher import LauncherFactory


class _Parser(argparse.ArgumentParser):
    """A parser whose usage errors name the help."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(2, f"{self.prog}: {message}\nTry `{self.prog} --help`.\n")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    shared = _Parser(add_help=False)
    shared.add_argument(
        "-o", "--output", choices=("text", "json"), default=argparse.SUPPRESS, help="default: text"
    )
    spec = _Parser(add_help=False)
    spec.add_argument(
        "-f", "--file", type=Path, metavar="FILE", help="spec (default: ./kvasir.yaml, or the embedded)"
    )
    spec.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="KEY.PATH=VALUE",
        help="change one field, a list item by index or name: pools.decode.replicas=2 (repeatable)",
    )
    port = _Parser(add_help=False)
    port.add_argument("--port", type=int, metavar="N", help="the gateway's port; 0: a free one")
    named = _Parser(add_help=False)
    named.add_argument("name", nargs="?", help="the deployment, if several run")

    addressed = _address_options()
    gateway = _Parser(add_help=False, parents=[addressed])
    gateway.add_argument("--name", help="the deployment, if several run on this machine")
    top = _Parser(
        prog="kvasir",
        parents=[shared],
        description="Serve large language models with prefill and decode apart.",
        epilog=TOP_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    add = adder(commands, shared)
    up = add("up", "start a deployment on this machine", spec, port, epilog=UP_EPILOG)
    up.add_argument("--detach", action="store_true", help="return when it is ready; stop with `kvasir down`")
    up.add_argument(
        "--timeout",
        type=positive,
        metavar="S",
        help="abort a start after S seconds (scaling.start_timeout_s of kvasir.yaml, 900)",
    )
    add("down", "stop a deployment and clean up after it", named)
    add_live(add, gateway, addressed)
    add_cost(add, gateway)
    _add_operations(add, gateway)
    check = add("check", "check whether a deployment would start here", spec, port, epilog=CHECK_EPILOG)
    add_check_options(check)
    _add_measurements(add, gateway)
    add("version", "print the versions of Kvasir and its dependencies")
    add_keys(add, shared, spec)
    add_lora(add, shared, gateway)
    add_batch(add, shared, gateway)
    add_rollout(add, shared, gateway)
    add_record(add, gateway)
    add_picker(add)
    add_bench(commands, shared)
    _add_config(commands, shared, spec)
    return top


def _add_operations(add: Add, gateway: _Parser) -> None:
    """Add what operators ask and tell a running deployment."""
    explain = add(
        "explain",
        "explain why a request ran where it ran, how good decisions were, or why pools have their sizes",
        gateway,
        epilog=EXPLAIN_EPILOG,
    )
    explain.add_argument(
        "request_id",
        nargs="?",
        metavar="REQUEST_ID",
        help="the response's header x-request-id, or the word scaling; by default, all decisions together",
    )
    get = add("get", "list the router's view of workers", gateway, epilog=GET_EPILOG)
    get.add_argument("what", choices=("workers",), metavar="workers", help="the list to print")
    drain = add("drain", "take a worker out of service, or put it back", gateway, epilog=DRAIN_EPILOG)
    _add_drain_options(drain)
    restart = add("restart", "replace a pool's workers one by one", epilog=RESTART_EPILOG)
    restart.add_argument("pool", metavar="POOL", help="as in kvasir.yaml")
    scale = add("scale", "set a pool's size, or return it to the planner", epilog=SCALE_EPILOG)
    scale.add_argument("desired_sizes", metavar="POOL=N", nargs="+", help="N a number, or auto")
    for command in (restart, scale):
        command.add_argument("--name", help="the deployment, if several run")


def _add_measurements(add: Add, gateway: _Parser) -> None:
    """Add what computes, simulates and measures the performance of deployments."""
    plan = add("plan", "compute what to run for a load, and what it costs", epilog=PLAN_EPILOG)
    add_plan_options(plan)
    sim = add("sim", "simulate a deployment with its traffic, in virtual time", epilog=SIM_EPILOG)
    add_sim_options(sim)
    verify = add("verify", "check answers and measure speed of what runs", gateway, epilog=VERIFY_EPILOG)
    add_verify_options(verify)
    calibrate = add(
        "calibrate",
        "measure what runs, and write a profile of its performance",
        gateway,
        epilog=CALIBRATE_EPILOG,
    )
    add_calibrate_options(calibrate)


def _address_options() -> _Parser:
    gateway = _Parser(add_help=False)
    gateway.add_argument(
        "--address",
        metavar="HOST:PORT",
        help="a gateway other than this machine's; https://HOST:PORT if it serves HTTPS",
    )
    add_tls_options(gateway)
    return gateway


def _add_config(commands: argparse._SubParsersAction[_Parser], shared: _Parser, spec: _Parser) -> None:
    config = commands.add_parser(
        "config", parents=[shared], help="print the schema, validate or show a kvasir.yaml"
    )
    actions = config.add_subparsers(dest="action", required=True, metavar="ACTION")
    actions.add_parser("schema", parents=[shared], help="print the JSON schema, for editors")
    for action, text in (
        ("validate", "report every error with its line"),
        ("show", "print the deployment with all defaults"),
    ):
        reader = actions.add_parser(action, parents=[shared, spec], help=text)
        reader.add_argument("path", nargs="?", type=Path, metavar="FILE", help="the same as -f FILE")


def _add_drain_options(drain: argparse.ArgumentParser) -> None:
    drain.add_argument("worker", metavar="WORKER", help="its name, as `kvasir get workers` shows it")
    drain.add_argument("--undo", action="store_true", help="put the worker back")
    drain.add_argument("--reason", default="", metavar="TEXT", help="shown by `kvasir get workers`")
    drain.add_argument("--no-wait", action="store_true", help="return without waiting for the drain")
    drain.add_argument(
        "--timeout", type=number(0.0, 1e6), metavar="S", help="wait at most S seconds (300; with --undo 10)"
    )


def main(argv: Sequence[str] | None = None, *, make_launcher: LauncherFactory | None = None) -> int:
    """Run one command and return its exit status. `make_launcher` replaces Ray, for tests."""
    args = parser().parse_args(argv)
    output = CommandOutput(json=getattr(args, "output", "text") == "json")
    commands: dict[str, Callable[[], int]] = {
        "up": lambda: _up(args, output, make_launcher),
        "down": lambda: _down(args, output),
        **dict.fromkeys(LIVE, lambda: run_live(args, partial(_site_at, args), output)),
        "get": lambda: _get(args, output),
        "explain": lambda: _explain(args, output),
        "drain": lambda: _drain(args, output),
        "restart": lambda: _restart(args, output),
        "scale": lambda: _scale(args, output),
        "check": lambda: _check(args, output),
        "config": lambda: _config(args, output),
        "keys": lambda: run_keys(args, output),
        "cost": lambda: run_cost(args, _site(args), output),
        "lora": lambda: run_lora(args, _site(args), output),
        "batch": lambda: run_batch(args, _site(args), output),
        "picker": lambda: run_picker(args),
        "rollout": lambda: run_rollout(args, partial(_site_at, args), output),
        "record": lambda: run_record(args, partial(_site_at, args), output),
        "bench": lambda: run_bench(args, output),
        "plan": lambda: _plan(args, output),
        "sim": lambda: _sim(args, output),
        "verify": lambda: _verify(args, output),
        "calibrate": lambda: _calibrate(args, output),
        "version": lambda: _version(output),
    }
    try:
        return commands[args.command]()
    except ConfigError as error:
        output.error(error)
        return 2
    except KvasirError as error:
        output.error(error)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output has gone (`| head`).
        output.detach()
        return 1


def _up(args: argparse.Namespace, output: CommandOutput, make_launcher: LauncherFactory | None) -> int:
    from kvasir_platform.cli.commands.up import up

    return up(args, output, make_launcher)


def _down(args: argparse.Namespace, output: CommandOutput) -> int:
    from kvasir_platform.cli.commands.down import down

    return down(args.name, output)


def _site(args: argparse.Namespace) -> Site:
    from kvasir_platform.cli.common.running import GatewayAddress, gateway_site

    return gateway_site(GatewayAddress(args.name, args.address, args.cacert, args.cert, args.key))


def _site_at(args: argparse.Namespace, address: str | None) -> Site:
    """Return the gateway at an address, with the certificates of the command line; None: the selected one."""
    if address is None:
        return _site(args)
    from kvasir_platform.cli.common.running import GatewayAddress, gateway_site

    return gateway_site(GatewayAddress(None, address, args.cacert, args.cert, args.key))


def _get(args: argparse.Namespace, output: CommandOutput) -> int:
    from kvasir_platform.cli.commands.get import get_workers

    return get_workers(_site(args), output)


def _explain(args: argparse.Namespace, output: CommandOutput) -> int:
    if args.request_id == "scaling":
        from kvasir_platform.cli.commands.explain.scaling import explain_scaling

        return explain_scaling(args.name, output)
    if args.request_id is None:
        from kvasir_platform.cli.commands.explain.regret import explain_regret

        return explain_regret(_site(args), output)
    from kvasir_platform.cli.commands.explain.request import explain

    return explain(args.request_id, _site(args), output)


def _drain(args: argparse.Namespace, output: CommandOutput) -> int:
    from kvasir_platform.cli.commands.drain import DrainArguments, drain

    desired = DrainArguments(
        args.worker, undo=args.undo, reason=args.reason, wait=not args.no_wait, timeout_s=args.timeout
    )
    return drain(desired, _site(args), output)


def _restart(args: argparse.Namespace, output: CommandOutput) -> int:
    from kvasir_platform.cli.commands.restart import restart

    return restart(args.pool, args.name, output)


def _scale(args: argparse.Namespace, output: CommandOutput) -> int:
    from kvasir_platform.cli.commands.scale import scale

    return scale(args.desired_sizes, args.name, output)


def _check(args: argparse.Namespace, output: CommandOutput) -> int:
    from kvasir_platform.cli.commands.check import check

    return check(args, output)


def _config(args: argparse.Namespace, output: CommandOutput) -> int:
    from kvasir_platform.cli.commands.config import config

    return config(args, output)


def _verify(args: argparse.Namespace, output: CommandOutput) -> int:
    from datetime import UTC, datetime

    from kvasir_platform.cli.commands.verify import quality_options, verify
    from kvasir_platform.cli.verify.run import VerifyOptions

    site = _site(args)
    options = VerifyOptions(
        model=args.model,
        prompt_tokens=args.prompt_tokens,
        streams=args.streams,
        link_bytes_per_s=None if args.link_gbps is None else args.link_gbps * 1e9 / 8,
        timeout_s=args.timeout,
        quality=quality_options(args, site),
    )
    return verify(options, site, args.report, output, datetime.now(UTC))


def _plan(args: argparse.Namespace, output: CommandOutput) -> int:
    from kvasir_platform.cli.commands.plan import plan

    return plan(args, output)


def _sim(args: argparse.Namespace, output: CommandOutput) -> int:
    from kvasir_platform.cli.sim.command import sim

    return sim(args, output)


def _calibrate(args: argparse.Namespace, output: CommandOutput) -> int:
    from datetime import UTC, datetime

    from kvasir_platform.cli.calibrate.command import CalibrateOptions, calibrate

    options = CalibrateOptions(args.model, args.profile, args.repeats, args.quick, args.timeout)
    return calibrate(options, _site(args), output, datetime.now(UTC), local=args.address is None)


def _version(output: CommandOutput) -> int:
    from kvasir_platform.cli.commands.version import version

    return version(output)


if __name__ == "__main__":
    sys.exit(main())
