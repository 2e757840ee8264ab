"""From a body of the Responses API to what its call needs: a chat, and the items to store with its response.

Both take some microseconds for every item of the conversation, so that long ones are translated in a thread.
"""

from __future__ import annotations

from kvasir.ports.responses import StoredResponse
from kvasir_platform.gateway.openai.schema.chat import ChatBody
from kvasir_platform.gateway.responses.body import ResponsesBody
from kvasir_platform.gateway.responses.conversation import chat_body, input_items
from kvasir_platform.gateway.responses.stored_items import conversation_of, items_json

MAX_INLINE_BYTES = 16 << 10
"""Size of a conversation, sent and stored, that is translated on the event loop."""


def translated(
    asked: ResponsesBody, previous: StoredResponse | None, *, key: str, default_output: int, stores: bool
) -> tuple[ChatBody, bytes]:
    """Return the chat of a body that goes on from `previous`, and the items to store with its response, none
    unless it `stores` them. `key` makes their ids unique; `default_output` is as for chat_body. Raise
    RequestError."""
    earlier = [] if previous is None else conversation_of(previous, "previous_response_id")
    chat = chat_body(asked, earlier, default_output=default_output)
    return chat, items_json(key, earlier, input_items(asked)) if stores else b""
