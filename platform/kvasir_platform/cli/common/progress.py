"""Shows the progress of a start: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from kvasir.config.spec.deployment import Deployment
from kvasir.core.errors import StartError
from kvasir.core.membership import host_port
from kvasir_platform.cli.common.gateway_site import reachable
from kvasir_platform.cli.common.output import CommandOutput
from kvasir_platform.cluster.local.processes import tail
from kvasir_platform.cluster.local.supervisor import StartProgress

_TAIL_LINES = 20


class ProgressDisplay:
    """Shows Progress events as they arrive. `elapsed` returns the seconds since the start."""

    def __init__(
        self, deployment: Deployment, output: CommandOutput, logs: Path, elapsed: Callable[[], float]
    ) -> None:
        self._deployment = deployment
        self._output = output
        self._logs = logs
        self._elapsed = elapsed
        self._step = ""
        self._text = ""

    def show(self, progress: StartProgress) -> None:
        """Show one event."""
        self._output.data(asdict(progress))
        if progress.event in ("step", "detail"):
            self._step, self._text = progress.step, progress.text
            if not self._output.is_terminal:
                self._output.text(self._line("..."))
            self.tick()
        elif progress.event == "done":
            self._finish("ok ")
        elif progress.event == "ready":
            self._ready(progress)
        elif progress.event == "stopping":
            self._finish("-- ")
            self._output.text(f"stopping ({progress.text})")
        elif progress.event == "failed":
            self._finish("ERR")
        elif progress.event == "stopped":
            left = f"; left behind: {progress.text}" if progress.text else ": nothing is left running"
            self._output.text(f"stopped{left}")

    def tick(self) -> None:
        """Redraw the live line with the elapsed time."""
        if self._step and self._output.is_terminal:
            self._output.redraw(self._line("...")[:110])

    def _line(self, mark: str) -> str:
        text = f"  {self._text}" if self._text else ""
        return f"{mark} {self._elapsed():6.1f} s  {self._step:<9}{text}"

    def _finish(self, mark: str) -> None:
        if self._step:
            if self._output.is_terminal:
                self._output.redraw("")
            self._output.text(self._line(mark))
        self._step = ""

    def _ready(self, progress: StartProgress) -> None:
        models = [view.model.name for view in self._deployment.views()]
        verb = "is" if len(models) == 1 else "are"
        tls = self._deployment.gateway.tls
        url = f"{'http' if tls.cert_file is None else 'https'}://{reachable(progress.text)}"
        self._output.text(f"\n{', '.join(models)} {verb} served at {url} after {progress.elapsed_s:.0f} s\n")
        self._output.text(curl_line(self._deployment, url))
        self._output.text(f"\n  console         {console_url(self._deployment, url)}")
        self._output.text("  kvasir status   shows workers, load and memory")
        self._output.text("  kvasir down     stops everything, as Ctrl-C does here")
        self._output.text(f"  logs            {self._logs}\n")


def console_url(deployment: Deployment, url: str) -> str:
    """Return the address of the console of the gateway at `url`."""
    console = deployment.gateway.console
    if console.port is not None:
        url = f"{url.partition('://')[0]}://{reachable(host_port(console.host, console.port))}"
    return f"{url}/console"


def curl_line(deployment: Deployment, url: str) -> str:
    """Return an example request for the first model that generates, else for the first."""
    views = deployment.views()
    view = next((each for each in views if not each.embeds), views[0])
    key = ' -H "Authorization: Bearer $KVASIR_API_KEY"' if deployment.gateway.authenticates else ""
    if view.embeds:
        path, body = "embeddings", f'{{"model": "{view.model.name}", "input": "Tell me a story."}}'
    else:
        path = "chat/completions"
        body = (
            f'{{"model": "{view.model.name}", "stream": true, "max_tokens": 64, '
            '"messages": [{"role": "user", "content": "Tell me a story."}]}'
        )
    return f"  curl -N {url}/v1/{path} -H 'Content-Type: application/json'{key} \\\n    -d '{body}'"


def explain(error: StartError, output: CommandOutput) -> None:
    """Print why the start failed, what to do, and the end of the log if it has the reason."""
    output.error(error)
    if error.is_root:
        if error.remedy:
            output.text(f"{error.remedy[0].upper()}{error.remedy[1:]}.")
        output.text(f"The worker's log is {error.log}.")
        return
    if error.log:
        lines = tail(Path(error.log), _TAIL_LINES)
        if lines:
            output.text(f"\nthe last lines of {error.log}:")
        for line in lines:
            output.text(f"  | {line}")
    if error.remedy:
        output.text(f"\n{error.remedy[0].upper()}{error.remedy[1:]}.")
