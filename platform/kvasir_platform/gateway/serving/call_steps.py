"""One call on its way through the gateway, as an object that each step reports back to.

    start ──▶ tokenizing ──▶ encoded ──▶ admitting ──▶ admitted ──▶ its router requests, or its answer
                  └── failed ◀──────────────┘

Tokenizers and rate limits may answer at once or in a later turn of the event loop. Either way they call a
method of the call, and whatever a step raises becomes the call's answer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence

from kvasir.telemetry.reasons import CLIENT_CLOSED
from kvasir_platform.gateway.http.exchange import Exchange
from kvasir_platform.gateway.serving.error_answers import ErrorAnswers
from kvasir_platform.gateway.tenants.caller import Caller, Charge


class ServedCall(ABC):
    """A call of `caller` on `exchange`. `kvasir_platform.gateway.prompt.tokenization.EncodingReceiver` and
    `kvasir_platform.gateway.tenants.caller.ChargeReceiver`. `model` is what it is counted for."""

    __slots__ = ("caller", "errors", "exchange", "model")

    def __init__(self, caller: Caller, exchange: Exchange, errors: ErrorAnswers) -> None:
        self.caller = caller
        self.exchange = exchange
        self.errors = errors
        self.model: str | None = None

    def encoded(self, ids: list[array[int]]) -> None:
        """The tokenizer has made the ids of the texts. May raise KvasirError."""
        if not self._client_left():
            self.submit(ids)

    def admitted(self, charge: Charge) -> None:
        """The tenant's limits let the call in, and have charged it."""
        try:
            if self._client_left():
                charge.release()
                return
            self.exchange.lines += charge.header_lines
            try:
                self.run(charge)
            # What is charged and never released takes one of the tenant's places for good.
            except BaseException:
                charge.release()
                raise
        except Exception as error:  # noqa: BLE001 - it is the call's answer, and not the next call's
            self.failed(error)

    def failed(self, error: BaseException) -> None:
        """A step failed: answer the client, unless the call has been answered."""
        self.errors.answer(self.exchange, error)

    @abstractmethod
    def submit(self, encoded: Sequence[array[int]]) -> None:
        """Validate the prompts, whose texts are `encoded`, and ask for admission. May raise KvasirError."""

    @abstractmethod
    def run(self, charge: Charge) -> None:
        """Do the work, and settle or release the charge at its end. May raise KvasirError."""

    def _client_left(self) -> bool:
        """Whether nobody waits for the answer any more, which is counted."""
        if self.exchange.open:
            return False
        self.errors.refused(CLIENT_CLOSED, self.model)
        return True
