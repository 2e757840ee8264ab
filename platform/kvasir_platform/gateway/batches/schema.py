"""Bodies and answers of `/v1/files` and `/v1/batches`, with OpenAI's fields."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from kvasir_platform.gateway.openai.schema.limits import Metadata, NotServed

FILES, BATCHES = "/v1/files", "/v1/batches"
EMBEDDINGS = "/v1/embeddings"
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", EMBEDDINGS, "/v1/responses")
"""What the lines of a batch may call."""

BatchStatus = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]
FINAL = frozenset(("failed", "completed", "expired", "cancelled"))


class FileObject(Struct, kw_only=True):
    """A file. Times are Unix times in seconds; it is removed after `expires_at`."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"


class FileList(Struct):
    """Files, the newest first."""

    object: Literal["list"]
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(Struct):
    """The answer to DELETE."""

    id: str
    object: Literal["file"]
    deleted: bool


class BatchCounts(Struct):
    """Lines of a batch: all, those with an answer, and those that ended with an error. A line is counted when
    its result is stored."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchError(Struct):
    """Why a batch failed before it began: an error of the whole file, or of one `line`, the first being 1."""

    code: str
    message: str
    param: str | None
    line: int | None


class BatchErrors(Struct):
    """The first errors of a file."""

    object: Literal["list"]
    data: list[BatchError]


class InputDetails(Struct):
    """Of the input tokens, those that were cached."""

    cached_tokens: int = 0


class OutputDetails(Struct):
    """Of the output tokens, those of reasoning."""

    reasoning_tokens: int = 0


class BatchUsage(Struct):
    """Tokens of all lines with an answer."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int

    @classmethod
    def none(cls) -> BatchUsage:
        """Return the usage of no line."""
        return cls(0, InputDetails(), 0, OutputDetails(), 0)


class BatchObject(Struct, kw_only=True):
    """A batch. Times are Unix times in seconds."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    model: str | None = None
    errors: BatchErrors | None = None
    input_file_id: str
    completion_window: str
    status: BatchStatus = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: BatchCounts
    usage: BatchUsage
    metadata: dict[str, str] | None = None


class BatchList(Struct):
    """Batches, the newest first."""

    object: Literal["list"]
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class CreateBatchBody(Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """POST /v1/batches. `completion_window` is a whole number and `m`, `h` or `d`, as in `24h`."""

    input_file_id: Annotated[str, Meta(min_length=1, max_length=64)]
    endpoint: Annotated[str, Meta(max_length=64)]
    completion_window: Annotated[str, Meta(max_length=16)]
    metadata: Metadata | None = None

    output_expires_after: NotServed = None
