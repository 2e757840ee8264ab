"""Codes of requests that cannot be served as they were sent."""

from __future__ import annotations

from kvasir.telemetry.codes.reason import Reason

REQUEST_REASONS = (
    Reason("invalid_json", 400, "The body is not valid JSON, or not UTF-8.", "Send one JSON object."),
    Reason("invalid_type", 400, "A field has the wrong type.", "Send the type that the message names."),
    Reason("invalid_value", 400, "The value of a field is out of range or invalid.", "See `param`."),
    Reason("missing_parameter", 400, "A required field is missing.", "Add the field in `param`."),
    Reason("unknown_parameter", 400, "The API has no such field.", "Remove the field in `param`."),
    Reason(
        "unsupported_parameter",
        400,
        "The API has the field, but this server does not support it.",
        "Remove it.",
    ),
    Reason(
        "unsupported_modality",
        400,
        "Files were sent, or images, videos or audio to a model that takes none here.",
        "Send what the model takes; the message names it.",
    ),
    Reason(
        "invalid_image",
        400,
        "An image is no data URL in base64, is damaged, or of another format than PNG, JPEG, GIF and WebP.",
        "See `param`; the message has the reason.",
    ),
    Reason(
        "image_too_large",
        400,
        "An image has more bytes or pixels than `gateway.image_inputs` allows.",
        "Send a smaller one; the message has the limit.",
    ),
    Reason(
        "too_many_images",
        400,
        "A request has more images than `gateway.image_inputs.max_images`.",
        "Send fewer; the message has the limit.",
    ),
    Reason(
        "image_url_refused",
        400,
        "An image is a URL of an origin that is not in `gateway.image_inputs.url_origins`.",
        "Send the image as a data URL.",
    ),
    Reason(
        "image_fetch_failed",
        400,
        "An image could not be fetched from its URL.",
        "The message has the reason; or send the image as a data URL.",
    ),
    Reason(
        "invalid_media",
        400,
        "A video or audio is no data URL in base64, is damaged, or is neither MP4, for videos, nor "
        "WAV, MP3 or FLAC, for audio.",
        "See `param`; the message has the reason.",
    ),
    Reason(
        "media_too_large",
        400,
        "A video or audio has more bytes, pixels or seconds than `gateway.video_inputs` and "
        "`gateway.audio_inputs` allow.",
        "Send a smaller one; the message has the limit.",
    ),
    Reason(
        "too_many_media",
        400,
        "A request has more videos than `gateway.video_inputs.max_videos`, or more audio files than "
        "`gateway.audio_inputs.max_clips`.",
        "Send fewer; the message has the limit.",
    ),
    Reason(
        "media_url_refused",
        400,
        "A video or audio is a URL of an origin that is not in `url_origins` of `gateway.video_inputs` or "
        "`gateway.audio_inputs`.",
        "Send the file as a data URL.",
    ),
    Reason(
        "media_fetch_failed",
        400,
        "A video or audio could not be fetched from its URL.",
        "The message has the reason; or send the file as a data URL.",
    ),
    Reason(
        "unsupported_task",
        400,
        "The model does not support the task: generation, or embeddings.",
        "Use the path or the model that the message names.",
    ),
    Reason(
        "context_length_exceeded",
        400,
        "Prompt and output together exceed the model's context.",
        "Shorten the prompt or lower max_tokens; the message has the numbers.",
    ),
    Reason(
        "output_limit_exceeded",
        400,
        "The requested output exceeds the limit of the tenant for one request.",
        "Lower max_tokens; the message has the limit.",
    ),
    Reason(
        "token_limit_too_small",
        400,
        "The request can use more tokens than the tenant's limit per minute, so a retry cannot succeed.",
        "Shorten the prompt, or lower max_tokens or n.",
    ),
    Reason(
        "body_too_complex",
        400,
        "The body has too many arrays and objects, or values.",
        "Send fewer; the message has the limit.",
    ),
    Reason(
        "grammar_too_costly",
        400,
        "The schema, pattern or grammar of the output can be matched in too many ways, or takes too long.",
        "Do not repeat what is optional or repeated already; separate repeated parts by a delimiter.",
    ),
    Reason(
        "previous_response_not_found",
        400,
        "There is no stored response of the id in previous_response_id.",
        "Send the whole conversation as input; the message says how long responses are stored.",
    ),
    Reason(
        "unknown_slo_class",
        400,
        "The header x-kvasir-slo names an unknown SLO class.",
        "Use one that the message lists, or omit the header.",
    ),
    Reason(
        "adapter_unreadable",
        400,
        "Files of a LoRA adapter are missing, truncated or not in PEFT's format with safetensors.",
        "See the message; name a source that every worker of the model can read.",
    ),
    Reason(
        "adapter_too_large",
        400,
        "The files of a LoRA adapter are larger than lora_loading.max_bytes.",
        "Raise it, or train a smaller adapter.",
    ),
    Reason(
        "adapter_rank_too_large",
        400,
        "The rank of a LoRA adapter is larger than lora_loading.max_rank.",
        "Raise it and restart the pools, or train an adapter of lower rank.",
    ),
    Reason(
        "adapter_base_mismatch",
        400,
        "A LoRA adapter does not fit the shapes of the model.",
        "Load it for the model that it was trained on.",
    ),
    Reason("adapter_refused", 400, "The engine does not accept a LoRA adapter.", "See the engine's message."),
    Reason("invalid_request", 400, "The request cannot be served as sent.", "Read the message."),
    Reason("malformed_http", 400, "The bytes are not well-formed HTTP/1.1.", "Fix the client or the proxy."),
    Reason("missing_host", 400, "No Host header, or more than one.", "Send exactly one Host header."),
)
