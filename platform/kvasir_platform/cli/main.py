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
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from kvasir.core.errors import ConfigError, KvasirError
from kvasir_platform.cli.common.output import CommandOutput

if TYPE_CHECKING:
    from kvasir_platform.cli.common.gateway_site import Site
    from kvasir_platform.cluster.local.launcher import LauncherFactory

_EPILOG = """\
examples:
  kvasir up                                  serve the model that ships with Kvasir
  kvasir up -f kvasir.yaml --port 9000       serve what a file describes
  kvasir up --set model.source=./my-llama    change one field, without a file
  kvasir check -f kvasir.yaml                check whether it would start here
  kvasir status                              workers, load, processes
  kvasir get workers                         each worker's blocks, and how well the router knows them
  kvasir explain REQUEST_ID                  why a request ran where it ran, and its outcome
  kvasir explain scaling                     why each pool has its size
  kvasir scale decode=4                      set a pool's size; decode=auto returns it to the planner
  kvasir drain WORKER                        take a worker out of service without losing a stream
  kvasir restart POOL                        replace a pool's workers one by one, while it serves
  kvasir keys new --tenant research          an API key for a client
  kvasir down                                stop it, from any terminal

exit status: 0 done, 1 failed or nothing runs, 2 the command line or kvasir.yaml is invalid, 130 or 143 a
start was interrupted

Files live in ~/.kvasir (or $KVASIR_HOME): logs and state of each deployment."""

_UP_EPILOG = """\
Checks the machine first, then starts Ray, the pools of kvasir.yaml, the router and the gateway,
and stays in the foreground. Ctrl-C (or `kvasir down`) stops and removes everything; a
second Ctrl-C does not wait for running requests. Interrupted before it is ready, it exits with 130
(Ctrl-C) or 143 (SIGTERM).

examples:
  kvasir up
  kvasir up -f deploy/examples/aggregated.yaml
  kvasir up --set pools.decode.replicas=2 --set gateway.port=0
  kvasir up --detach && kvasir status && kvasir down"""

_CHECK_EPILOG = """\
Checks the file, the model, the port, memory, CPUs, shared memory, limits and installed packages, and
starts nothing. `kvasir up` runs the same checks first.

examples:
  kvasir check
  kvasir check -f kvasir.yaml -o json"""


_GET_EPILOG = """\
KV is how well the router knows the blocks in a worker's prefix cache:
  exact        every reported change is applied
  catching_up  a snapshot is in transfer; until then the router uses its own predictions
  predicted    the worker does not report, or its reports are not trusted; see REASON
BLOCKS are reported by the worker, PREDICTED by the router from the requests that it sent.

examples:
  kvasir get workers
  kvasir get workers -o json
  KVASIR_API_KEY=… kvasir get workers --address https://gateway.example:8000"""

_EXPLAIN_EPILOG = """\
REQUEST_ID is the response's header x-request-id (or `id` in its body). The output has the candidate workers,
the cost of each, the choice, and predicted against actual values. Columns of zeros are left out; -o json has
them.

The router keeps the decisions of running requests and of the latest that ended, up to
routing.decision_records in kvasir.yaml.

`kvasir explain scaling` shows the desired size of each pool with `scaling`, the reasons, and recent actions.
It queries the control process: on this machine, or in the head's pod of a cluster.

examples:
  curl -si http://127.0.0.1:8000/v1/chat/completions … | grep x-request-id
  kvasir explain scaling
  kvasir explain da87cef2245951d6dc2c075d
  kvasir explain da87cef2245951d6dc2c075d -o json"""


_DRAIN_EPILOG = """\
The worker gets no new requests from any router and completes those it runs; the command waits for that.
Then the process can be stopped or its machine removed. `kvasir get workers` lists the names, and which
workers drain, and why. Ctrl-C ends the wait, not the drain.

--undo puts the worker back. A drain lasts until the worker's process ends; a worker that is being stopped
continues to drain.

examples:
  kvasir drain decode-7f
  kvasir drain decode-7f --reason "kernel update" --timeout 600
  kvasir drain decode-7f --no-wait
  kvasir drain decode-7f --undo"""


_RESTART_EPILOG = """\
Each new worker starts beside the one that it replaces, with the code that is installed then. The old
one gets no new requests and completes those it runs (worker.drain_s); the rest fails over to other workers.
If no GPU is free for one more, each is stopped first; a pool's only worker is then not restarted.

Workers of another protocol, hash version, model, tokenizer or KV layout than the running ones do not start:
the restart ends there, and the old ones continue to serve.

examples:
  kvasir restart decode
  kvasir restart prefill -o json"""


_SCALE_EPILOG = """\
A pool with `scaling` keeps the size, whatever the plan, until auto returns it to the planner, also over a
restart of the control process. Any other pool keeps it until its size in kvasir.yaml changes. Surplus
replicas drain first (worker.drain_s).

examples:
  kvasir scale decode=4
  kvasir scale prefill=2 decode=6
  kvasir scale decode=auto"""


_KEYS_EPILOG = """\
The line holds a hash from which the key cannot be recovered. A tenant may have several keys: to rotate one,
add the next line, switch the clients, and remove the old line. Gateways reload within two seconds.

examples:
  kvasir keys new --tenant research --days 90
  kvasir -o json keys new --tenant research"""


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

    gateway = _Parser(add_help=False)
    gateway.add_argument("--name", help="the deployment, if several run on this machine")
    gateway.add_argument(
        "--address",
        metavar="HOST:PORT",
        help="a gateway other than this machine's; https://HOST:PORT if it serves HTTPS",
    )
    gateway.add_argument(
        "--cacert", metavar="FILE", help="its certificate authorities (PEM), in place of the system's"
    )
    gateway.add_argument("--cert", metavar="FILE", help="your certificate (PEM), if it requires one")
    gateway.add_argument("--key", metavar="FILE", help="its key; by default in the same file")

    top = _Parser(
        prog="kvasir",
        parents=[shared],
        description="Serve large language models with prefill and decode apart.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, text: str, *parents: _Parser, epilog: str = "") -> None:
        commands.add_parser(
            name,
            parents=[shared, *parents],
            help=text,
            description=text[0].upper() + text[1:] + ".",
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    add("up", "start a deployment on this machine", spec, port, epilog=_UP_EPILOG)
    add("down", "stop a deployment and clean up after it", named)
    add("status", "show what runs: workers, load, processes", named)
    add(
        "explain",
        "explain why a request ran where it ran, or why pools have their sizes",
        gateway,
        epilog=_EXPLAIN_EPILOG,
    )
    commands.choices["explain"].add_argument(
        "request_id", metavar="REQUEST_ID", help="the response's header x-request-id, or the word scaling"
    )
    add("get", "list the router's view of workers", gateway, epilog=_GET_EPILOG)
    commands.choices["get"].add_argument(
        "what", choices=("workers",), metavar="workers", help="the list to print"
    )
    add("drain", "take a worker out of service, or put it back", gateway, epilog=_DRAIN_EPILOG)
    _add_drain_options(commands.choices["drain"])
    add("restart", "replace a pool's workers one by one", epilog=_RESTART_EPILOG)
    commands.choices["restart"].add_argument("pool", metavar="POOL", help="as in kvasir.yaml")
    commands.choices["restart"].add_argument("--name", help="the deployment, if several run")
    add("scale", "set a pool's size, or return it to the planner", epilog=_SCALE_EPILOG)
    commands.choices["scale"].add_argument(
        "desired_sizes", metavar="POOL=N", nargs="+", help="N a number, or auto"
    )
    commands.choices["scale"].add_argument("--name", help="the deployment, if several run")
    add("check", "check whether a deployment would start here", spec, port, epilog=_CHECK_EPILOG)
    add("version", "print the versions of Kvasir and its dependencies")
    _add_keys(commands, shared)
    up = commands.choices["up"]
    up.add_argument("--detach", action="store_true", help="return when it is ready; stop with `kvasir down`")
    up.add_argument(
        "--timeout", type=float, default=300.0, metavar="S", help="abort a start after S seconds (300)"
    )
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
    return top


def _add_keys(commands: argparse._SubParsersAction[_Parser], shared: _Parser) -> None:
    keys = commands.add_parser("keys", parents=[shared], help="create API keys for clients")
    actions = keys.add_subparsers(dest="action", required=True, metavar="ACTION")
    new = actions.add_parser(
        "new",
        parents=[shared],
        help="print a key, once, and its line to store",
        description="Print a new API key and the line that gateways store. The key itself is not stored.",
        epilog=_KEYS_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    new.add_argument(
        "--tenant", default="default", metavar="NAME", help="its tenant, as in tenancy.tenants (default)"
    )
    new.add_argument("--days", type=int, metavar="N", help="its lifetime; unlimited if not given")


def _add_drain_options(drain: argparse.ArgumentParser) -> None:
    drain.add_argument("worker", metavar="WORKER", help="its name, as `kvasir get workers` shows it")
    drain.add_argument("--undo", action="store_true", help="put the worker back")
    drain.add_argument("--reason", default="", metavar="TEXT", help="shown by `kvasir get workers`")
    drain.add_argument("--no-wait", action="store_true", help="return without waiting for the drain")
    drain.add_argument(
        "--timeout", type=float, metavar="S", help="wait at most S seconds (300; with --undo 10)"
    )


def main(argv: Sequence[str] | None = None, *, make_launcher: LauncherFactory | None = None) -> int:
    """Run one command and return its exit status. `make_launcher` replaces Ray, for tests."""
    args = parser().parse_args(argv)
    output = CommandOutput(json=getattr(args, "output", "text") == "json")
    commands: dict[str, Callable[[], int]] = {
        "up": lambda: _up(args, output, make_launcher),
        "down": lambda: _down(args, output),
        "status": lambda: _status(args, output),
        "get": lambda: _get(args, output),
        "explain": lambda: _explain(args, output),
        "drain": lambda: _drain(args, output),
        "restart": lambda: _restart(args, output),
        "scale": lambda: _scale(args, output),
        "check": lambda: _check(args, output),
        "config": lambda: _config(args, output),
        "keys": lambda: _keys(args, output),
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


def _status(args: argparse.Namespace, output: CommandOutput) -> int:
    from kvasir_platform.cli.commands.status import status

    return status(args.name, output)


def _site(args: argparse.Namespace) -> Site:
    from kvasir_platform.cli.common.running import GatewayAddress, gateway_site

    return gateway_site(GatewayAddress(args.name, args.address, args.cacert, args.cert, args.key))


def _get(args: argparse.Namespace, output: CommandOutput) -> int:
    from kvasir_platform.cli.commands.get import get_workers

    return get_workers(_site(args), output)


def _explain(args: argparse.Namespace, output: CommandOutput) -> int:
    if args.request_id == "scaling":
        from kvasir_platform.cli.commands.explain_scaling import explain_scaling

        return explain_scaling(args.name, output)
    from kvasir_platform.cli.commands.explain import explain

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


def _keys(args: argparse.Namespace, output: CommandOutput) -> int:
    from datetime import UTC, datetime

    from kvasir_platform.cli.commands.keys import keys_new

    return keys_new(args.tenant, args.days, output, datetime.now(UTC))


def _version(output: CommandOutput) -> int:
    from kvasir_platform.cli.commands.version import version

    return version(output)


if __name__ == "__main__":
    sys.exit(main())
