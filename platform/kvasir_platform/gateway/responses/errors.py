"""Errors of the Responses API: in OpenAI's form, with the fields of its own bodies."""

from __future__ import annotations

from kvasir.core.errors import RequestError
from kvasir_platform.gateway.http.errors import OPENAI_ERRORS, ErrorFormat
from kvasir_platform.gateway.responses.conversation import responses_param


class ResponsesErrors:
    """`ErrorFormat`. Errors that were found after the translation to a chat name the chat's fields."""

    def body(self, error: Exception, request_id: str) -> bytes:
        """See ErrorFormat."""
        return OPENAI_ERRORS.body(_renamed(error), request_id)

    def event(self, error: Exception, request_id: str) -> bytes:
        """See ErrorFormat."""
        return OPENAI_ERRORS.event(_renamed(error), request_id)

    def lines(self, request_id: str) -> bytes:
        """See ErrorFormat."""
        return OPENAI_ERRORS.lines(request_id)


RESPONSES_ERRORS: ErrorFormat = ResponsesErrors()


def _renamed(error: Exception) -> Exception:
    if not isinstance(error, RequestError) or error.param is None:
        return error
    param = responses_param(error.param)
    if param == error.param:
        return error
    message = error.message.replace(error.param, param)
    return RequestError(message, status=error.status, code=error.code, param=param)
