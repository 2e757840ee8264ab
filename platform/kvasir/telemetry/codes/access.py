"""Codes of callers who lack the right to what they ask for, and of things that are not there or not in a
state for it."""

from __future__ import annotations

from kvasir.telemetry.codes.reason import Reason

ACCESS_REASONS = (
    Reason("invalid_api_key", 401, "The API key is missing or unknown.", "Send `Authorization: Bearer KEY`."),
    Reason("api_key_expired", 401, "The API key has expired.", "Use another key of your tenant."),
    Reason(
        "invalid_token",
        401,
        "The token does not verify, or is not for this deployment.",
        "Get a token of the issuer for this audience; the message says what does not fit.",
    ),
    Reason("token_expired", 401, "The token has expired.", "Get another one from its issuer."),
    Reason(
        "no_tenant",
        403,
        "The token is valid, and its claims name no tenant of the deployment.",
        "Ask the operator to map a claim of yours in gateway.token_issuers.",
    ),
    Reason(
        "data_residency",
        403,
        "The tenant's data stays in other regions than this one.",
        "Send the request to a gateway there; the message names them.",
    ),
    Reason(
        "insufficient_scope",
        403,
        "The scopes of the API key or the token do not cover the path.",
        "Use another key or token; the message has the scopes.",
    ),
    Reason(
        "operator_only",
        403,
        "The path is for operators of the deployment.",
        "Use a key of a tenant with `operator: true`.",
    ),
    Reason(
        "adapter_loading_disabled",
        403,
        "LoRA adapters cannot be loaded while the deployment runs.",
        "List the allowed sources in lora_loading.allow and start the deployment anew.",
    ),
    Reason(
        "adapter_source_not_allowed",
        403,
        "The source of a LoRA adapter is not in the allow-list.",
        "Add it, or a prefix of it, to lora_loading.allow.",
    ),
    Reason(
        "origin_not_allowed",
        403,
        "The origin of the web page is not allowed to call the API.",
        "List the page's origin in gateway.cors.origins.",
    ),
    Reason("model_not_found", 404, "No such model or adapter.", "See GET /v1/models for the names."),
    Reason("file_not_found", 404, "The tenant has no file of this id.", "See GET /v1/files."),
    Reason("batch_not_found", 404, "The tenant has no batch of this id.", "See GET /v1/batches."),
    Reason(
        "batches_disabled",
        404,
        "The server keeps no files and runs no batches.",
        "Set gateway.batches.storage.",
    ),
    Reason("file_in_use", 409, "A batch that has not ended reads the file.", "Cancel the batch first."),
    Reason(
        "file_limit",
        400,
        "The upload exceeds gateway.batches.max_files or max_bytes of the tenant.",
        "Delete files that are not needed.",
    ),
    Reason(
        "duplicate_custom_id",
        400,
        "Two lines of a batch have the same custom_id.",
        "Give each line its own.",
    ),
    Reason(
        "batch_limit",
        429,
        "The tenant has as many batches that have not ended as gateway.batches.max_batches.",
        "Wait for one to end, or cancel one.",
    ),
    Reason(
        "no_spare_capacity",
        503,
        "Other requests leave no capacity for a line of a batch.",
        "Nothing: it is sent again until the batch expires.",
    ),
    Reason(
        "storage_unavailable",
        503,
        "The storage of files and batches does not work, or too many calls wait for it.",
        "Check gateway.batches.storage: its space, rights and credentials.",
    ),
    Reason("not_found", 404, "No such path.", "See the API documentation."),
    Reason(
        "response_not_found",
        404,
        "There is no stored response of this id.",
        "Check the id; responses are stored in the router that made them, as the message says.",
    ),
    Reason(
        "costs_disabled",
        404,
        "Costs are not counted.",
        "Set `cost.enabled` to true in kvasir.yaml, and restart the routers.",
    ),
    Reason(
        "decision_not_found",
        404,
        "There is no record of a decision for this request id.",
        "Check the id; only the newest decisions are kept, as the message says.",
    ),
    Reason(
        "worker_not_found",
        404,
        "The router has no such worker.",
        "Use one that the message lists; `kvasir get workers` shows them.",
    ),
    Reason(
        "adapter_not_found",
        404,
        "No LoRA adapter of that name was loaded at run time.",
        "See `kvasir lora list`; adapters in `lora` of kvasir.yaml are removed there.",
    ),
    Reason("method_not_allowed", 405, "The path does not support this method.", "See the `Allow` header."),
    Reason("header_timeout", 408, "The request headers timed out.", "Send them at once."),
    Reason("body_timeout", 408, "The request body timed out.", "Send it faster or make it smaller."),
    Reason(
        "adapter_exists",
        409,
        "A model or a LoRA adapter has that name, or the adapter is being loaded or unloaded.",
        "Choose another name, or unload the adapter first.",
    ),
    Reason(
        "adapter_limit",
        409,
        "Workers hold as many LoRA adapters as lora_loading.max_adapters allows.",
        "Unload one, or raise the limit and restart the pools.",
    ),
)
