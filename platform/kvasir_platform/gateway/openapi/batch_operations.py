"""The operations on files and batches."""

from __future__ import annotations

from typing import Any

from kvasir_platform.gateway.batches.schema import (
    BATCHES,
    FILES,
    BatchList,
    BatchObject,
    CreateBatchBody,
    FileDeleted,
    FileList,
    FileObject,
)
from kvasir_platform.gateway.openapi.operation import Operation


def _page(most: int, usual: int) -> tuple[tuple[str, dict[str, Any], str], ...]:
    return (
        ("after", {"type": "string"}, "Id of the last item of the page before."),
        (
            "limit",
            {"type": "integer", "minimum": 1, "maximum": most},
            f"Items, {usual} by default.",
        ),
        ("order", {"enum": ["asc", "desc"]}, "`desc` by default: the newest first."),
    )


BATCH_OPERATIONS = (
    Operation(
        FILES,
        "post",
        "createFile",
        "Upload a file of lines for a batch.",
        FileObject,
        form=(("file", "The file, JSONL."), ("purpose", "`batch`.")),
    ),
    Operation(
        FILES,
        "get",
        "listFiles",
        "List files.",
        FileList,
        query=(*_page(10_000, 10_000), ("purpose", {"type": "string"}, "Only files of this purpose.")),
    ),
    Operation(FILES + "/{file_id}", "get", "retrieveFile", "Show a file.", FileObject),
    Operation(FILES + "/{file_id}", "delete", "deleteFile", "Delete a file.", FileDeleted),
    Operation(
        FILES + "/{file_id}/content",
        "get",
        "downloadFile",
        "Return the content of a file.",
        "application/jsonl",
    ),
    Operation(
        BATCHES,
        "post",
        "createBatch",
        "Create a batch from a file, which runs in capacity that other requests leave.",
        BatchObject,
        CreateBatchBody,
    ),
    Operation(BATCHES, "get", "listBatches", "List batches.", BatchList, query=_page(100, 20)),
    Operation(BATCHES + "/{batch_id}", "get", "retrieveBatch", "Show a batch.", BatchObject),
    Operation(BATCHES + "/{batch_id}/cancel", "post", "cancelBatch", "Cancel a batch.", BatchObject),
)
