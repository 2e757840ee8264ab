"""The table of errors: each code is provoked and returned with its status and remedy."""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvasir.core.errors import CapacityError, KvasirError, UpstreamError
from kvasir.telemetry.reasons import REASONS

ROOT = Path(__file__).parents[3]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "hi"}]
MAX_BODY = 65536


def post(path: str, body: Any, headers: str = "") -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\n{headers}"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


def get(path: str, headers: str = "") -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: t\r\n{headers}\r\n".encode()


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "kvasir-tiny", "messages": USER, **fields}


BEARER = "Authorization: Bearer secret\r\n"
PART = {"type": "image_url", "image_url": {"url": "http://x/y.png"}}

#: What clients send, by what they hear.
CAUSED: dict[str, bytes] = {
    "invalid_json": post(CHAT, b"{", BEARER),
    "invalid_type": post(CHAT, chat(n="two"), BEARER),
    "invalid_value": post(CHAT, chat(n=0), BEARER),
    "missing_parameter": post(CHAT, {"model": "kvasir-tiny"}, BEARER),
    "unknown_parameter": post(CHAT, chat(temprature=1), BEARER),
    "unsupported_parameter": post(CHAT, chat(use_beam_search=True), BEARER),
    "unsupported_modality": post(CHAT, chat(messages=[{"role": "user", "content": [PART]}]), BEARER),
    "unsupported_task": post("/v1/embeddings", {"model": "kvasir-tiny", "input": "x"}, BEARER),
    "context_length_exceeded": post(CHAT, chat(max_tokens=100_000), BEARER),
    "body_too_complex": post(CHAT, b"[" * 40_000, BEARER),
    "grammar_too_costly": post(CHAT, chat(guided_regex="((a*)*)*"), BEARER),
    "unknown_slo_class": post(CHAT, chat(), BEARER + "x-kvasir-slo: never\r\n"),
    "malformed_http": b"GET / HTTP/1.1\r\nHost t\r\n\r\n",
    "missing_host": b"GET / HTTP/1.1\r\n\r\n",
    "invalid_api_key": get("/v1/models"),
    "model_not_found": post(CHAT, chat(model="gpt-9"), BEARER),
    "not_found": get("/nowhere", BEARER),
    "decision_not_found": get("/decisions/x", BEARER),
    "method_not_allowed": get(CHAT, BEARER),
    "body_too_large": post(CHAT, b" " * (MAX_BODY + 1), BEARER),
    "target_too_long": b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: t\r\n\r\n",
    "unsupported_media_type": post(CHAT, chat(), BEARER + "Content-Encoding: gzip\r\n"),
    "expectation_failed": post(CHAT, chat(), BEARER + "Expect: a miracle\r\n"),
    "headers_too_large": get("/", "X: a\r\n" * 200),
    "unsupported_transfer_encoding": (
        b"POST / HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n"
    ),
    "http_version_not_supported": b"GET / HTTP/2.0\r\nHost: t\r\n\r\n",
}

#: The same, of a gateway that asks for no key and holds one connection of a client.
CAUSED_OPEN = {"origin_not_allowed", "too_many_client_connections"}
FROM_ELSEWHERE = get("/v1/models", "Origin: https://elsewhere.example\r\n")

#: What the router, a worker or a store says of a request, whatever a client sends. Another test causes each
#: of them; here a scripted router says it, so that its answer and its stream are as the table says.
PASSED_ON = frozenset(
    code for code, reason in REASONS.items() if reason.status >= 500 and code not in CAUSED
) | {"tenant_queue_full", "tenant_over_share", "request_too_large", "invalid_request"}

#: By module and test, the codes that the test causes: they take a deployment, a load or a state of their own.
ELSEWHERE: dict[str, dict[str, tuple[str, ...]]] = {
    "tests/e2e/gateway/test_error_causes.py": {
        "test_a_worker_that_drains_before_its_router_knows_refuses": ("worker_draining",),
        "test_a_worker_that_loses_a_token_is_told_to_the_client": ("protocol_error",),
        "test_an_id_that_is_in_flight_is_not_used_twice": ("duplicate_request",),
        "test_a_stored_file_that_others_wrote_over_is_a_fault_of_ours": ("internal_error",),
        "test_without_a_worker_there_is_none_to_serve_to_drain_or_to_be_ready": (
            "no_workers",
            "not_ready",
            "session_lost",
            "worker_not_found",
        ),
        "test_a_stream_that_no_other_worker_can_repeat_exactly_ends_with_the_loss": ("worker_lost",),
        "test_a_full_queue_refuses": ("queue_full",),
        "test_a_tenant_fills_its_part_of_the_queue_and_not_the_rest": ("tenant_queue_full",),
        "test_a_router_is_recorded_and_watched_by_so_many_at_once": (
            "too_many_recordings",
            "no_capacity",
        ),
    },
    "tests/faults/test_vllm_errors.py": {
        "test_what_vllm_refuses_or_trips_over_ends_one_request": ("invalid_request", "worker_failed"),
        "test_rules_beyond_those_that_wait_for_the_compiler_are_refused": ("worker_overloaded",),
        "test_a_killed_core_ends_what_ran_there_and_what_waited_for_its_kv": (
            "engine_dead",
            "transfer_failed",
        ),
    },
    "tests/e2e/gateway/test_admission_causes.py": {
        "test_who_waits_for_longer_than_the_queue_allows_is_told": ("queue_timeout",),
        "test_a_request_ends_with_its_deadline": ("request_timeout",),
        "test_who_would_wait_too_long_is_told_at_once": ("wait_too_long",),
        "test_who_cannot_start_before_its_deadline_is_told_at_once": ("deadline_unreachable",),
        "test_a_tenant_over_its_share_hears_that_it_is_its_own_load": ("tenant_over_share",),
        "test_a_brownout_refuses_the_class_that_it_sheds": ("shed",),
        "test_a_line_of_a_batch_that_others_leave_no_room_for_is_counted_and_sent_again": (
            "no_spare_capacity",
        ),
    },
    "tests/e2e/gateway/test_adapter_causes.py": {
        "test_what_is_wrong_with_a_source_is_told_before_an_engine_has_it": (
            "adapter_source_not_allowed",
            "adapter_unreadable",
            "adapter_base_mismatch",
            "adapter_source_unavailable",
            "adapter_not_found",
        ),
        "test_what_is_larger_than_the_engine_has_room_for_names_the_field_to_raise": (
            "adapter_rank_too_large",
            "adapter_too_large",
        ),
        "test_names_and_places_are_given_once_and_what_runs_is_waited_for": (
            "adapter_exists",
            "adapter_limit",
            "adapter_timeout",
        ),
        "test_an_adapter_is_kept_while_a_worker_that_holds_it_is_away": ("adapter_unreachable",),
        "test_where_nothing_may_be_loaded_the_field_to_set_is_named": ("adapter_loading_disabled",),
        "test_workers_that_read_other_files_than_the_first_leave_an_adapter_partly_loaded": (
            "adapter_load_failed",
        ),
    },
    "tests/e2e/gateway/test_loaded_adapters.py": {
        "test_what_only_the_engine_does_not_support_is_refused_in_its_words_and_it_serves_on": (
            "adapter_refused",
        ),
    },
    "tests/e2e/gateway/test_store_causes.py": {
        "test_without_its_stores_a_router_says_which_one_does_not_answer": (
            "api_keys_unavailable",
            "costs_unavailable",
            "rollouts_unavailable",
            "storage_unavailable",
        ),
        "test_orders_that_do_not_apply_to_a_rollout_are_refused_with_those_that_do": (
            "rollout_not_found",
            "rollout_state",
        ),
    },
    "tests/e2e/gateway/test_edge_causes.py": {
        "test_bodies_beyond_what_the_gateway_holds_are_refused": ("bodies_full",),
        "test_long_prompts_beyond_those_that_wait_for_the_tokenizer_are_refused": ("tokenizer_busy",),
        "test_streams_of_an_edge_that_cannot_keep_up_end_and_it_goes_on": ("edge_overloaded",),
        "test_streams_of_a_router_that_ended_end_with_it_and_later_calls_are_refused": ("router_lost",),
        "test_a_stream_that_no_other_cell_can_go_on_with_ends_with_its_cell": ("cell_lost",),
    },
    "tests/e2e/test_command_causes.py": {
        "test_a_drain_that_takes_longer_than_it_may_says_how_to_wait_on_or_undo_it": ("drain_timeout",),
        "test_what_cannot_work_as_configured_is_said_before_it_starts": ("config_error",),
        "test_a_deployment_whose_model_cannot_be_downloaded_does_not_start": ("start_failed",),
    },
    "tests/e2e/gateway/test_hostile_clients.py": {
        "test_slow_headers_are_cut_at_their_deadline": ("header_timeout",),
        "test_a_slow_body_is_cut_at_its_deadline": ("body_timeout",),
        "test_more_connections_than_allowed_are_told_so": ("too_many_connections",),
        "test_a_client_that_does_not_read_is_cut_and_others_are_not": ("slow_reader",),
    },
    "tests/e2e/gateway/test_images.py": {
        "test_what_is_no_small_image_is_refused_with_its_place": (
            "invalid_image",
            "image_too_large",
        ),
        "test_number_and_place_of_images_are_limited": ("too_many_images",),
        "test_images_of_listed_origins_are_fetched": (
            "image_url_refused",
            "image_fetch_failed",
        ),
        "test_images_beyond_what_a_worker_is_sent_of_one_request_are_refused": ("request_too_large",),
        "test_images_in_flight_are_bounded_and_given_back": ("images_busy",),
    },
    "tests/e2e/gateway/test_media.py": {
        "test_what_is_no_small_file_is_refused_with_its_place": (
            "invalid_media",
            "media_too_large",
        ),
        "test_number_place_and_form_of_media_are_limited": ("too_many_media",),
        "test_audio_of_listed_origins_is_fetched": (
            "media_url_refused",
            "media_fetch_failed",
        ),
    },
    "tests/e2e/gateway/test_tenants.py": {
        "test_an_expired_key_is_told_so": ("api_key_expired",),
        "test_only_operators_see_the_deployment": ("operator_only",),
        "test_a_tenants_context_and_output_are_bounded": ("output_limit_exceeded",),
        "test_a_request_that_could_never_fit_is_refused_for_good": ("token_limit_too_small",),
        "test_requests_beyond_the_limit_are_told_when_to_come_back": ("rate_limit_requests",),
        "test_tokens_that_were_not_used_are_given_back": ("rate_limit_tokens",),
        "test_a_place_is_free_again_when_its_request_ends_and_when_its_client_leaves": ("concurrency_limit",),
    },
    "tests/e2e/gateway/test_identity.py": {
        "test_both_protocols_take_tokens_and_say_what_is_wrong_with_one": (
            "invalid_token",
            "token_expired",
            "no_tenant",
        ),
        "test_a_lacking_scope_is_said_in_the_form_of_each_protocol": ("insufficient_scope",),
        "test_a_provider_that_fails_while_calls_wait_answers_them": ("signing_keys_unavailable",),
    },
    "tests/e2e/gateway/test_batches.py": {
        "test_files_are_listed_shown_and_deleted": ("file_not_found",),
        "test_batches_are_listed_the_newest_first": ("batch_not_found",),
        "test_without_a_folder_the_endpoints_say_so": ("batches_disabled",),
        "test_a_file_that_a_batch_reads_is_not_deleted": ("file_in_use",),
        "test_uploads_are_limited": ("file_limit",),
        "test_a_file_that_is_no_batch_fails_with_the_line": ("duplicate_custom_id",),
        "test_open_batches_are_limited": ("batch_limit",),
    },
    "tests/e2e/gateway/test_responses.py": {
        "test_a_conversation_goes_on_by_id_and_is_gone_when_deleted": (
            "response_not_found",
            "previous_response_not_found",
        ),
        "test_a_cancelled_background_response_leaves_its_worker": ("background_limit",),
    },
    "tests/e2e/gateway/test_costs.py": {
        "test_a_hard_budget_refuses_until_it_is_renewed_and_a_soft_one_warns": ("budget_exceeded",),
        "test_costs_that_are_not_counted_say_so": ("costs_disabled",),
    },
    "tests/e2e/gateway/test_filters.py": {
        "test_a_choice_ends_before_what_is_found_and_its_worker_is_freed": ("content_filter",),
    },
    "tests/e2e/gateway/test_openai_client.py": {
        "test_a_closed_stream_is_cancelled_within_200_ms": ("client_closed",),
    },
    "tests/e2e/gateway/test_operations.py": {
        "test_streams_that_outlast_the_drain_are_told_and_cancelled": ("shutting_down",),
    },
    "tests/e2e/gateway/test_regions.py": {
        "test_a_tenant_of_another_cell_is_refused_with_its_place": ("data_residency",),
    },
    "tests/security/test_http_edge.py": {
        "test_a_body_beyond_its_tenants_bytes_is_refused_before_it_is_read": ("rate_limit_bytes",),
    },
    "tests/security/test_http_tls.py": {
        "test_a_handshake_that_dawdles_is_cut_and_was_counted": ("tls_failed",),
    },
}


class Module:
    """A module of tests, read and not imported: some need programs and engines that are not everywhere."""

    def __init__(self, path: Path) -> None:
        self._named: dict[str, ast.stmt] = {}
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            for name in _names(node):
                self._named[name] = node

    def collects(self, test: str) -> bool:
        """Whether pytest finds the test: a function of the module, with the prefix for tests."""
        node = self._named.get(test)
        return test.startswith("test_") and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)

    def mentions(self, test: str, code: str) -> bool:
        """Whether the test has the code as a word of a string, or what it uses of its module has."""
        return any(re.search(rf"\b{code}\b", text) for text in self._texts(test, set()))

    def _texts(self, name: str, seen: set[str]) -> Iterator[str]:
        if name in seen or name not in self._named:
            return
        seen.add(name)
        node = self._named[name]
        # A docstring, and other texts that nothing is done with, cause nothing.
        idle = {id(each.value) for each in ast.walk(node) if isinstance(each, ast.Expr)}
        for each in ast.walk(node):
            if isinstance(each, ast.Constant) and id(each) not in idle:
                value = each.value
                yield value.decode("latin-1") if isinstance(value, bytes) else str(value)
            elif isinstance(each, ast.Name):
                yield from self._texts(each.id, seen)


def _names(node: ast.stmt) -> list[str]:
    """The names that a statement of a module binds."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


@pytest.fixture
def secured(tmp_path: Path) -> dict[str, Any]:
    """A gateway's spec with one key, `secret`, and small bounds."""
    keys = tmp_path / "keys"
    keys.write_text(hashlib.sha256(b"secret").hexdigest() + "\n")
    return {"api_keys_file": str(keys), "max_body_bytes": MAX_BODY}


def test_every_code_is_caused_by_one_test() -> None:
    elsewhere = [code for tests in ELSEWHERE.values() for codes in tests.values() for code in codes]
    caused = [*CAUSED, *CAUSED_OPEN, *elsewhere]
    assert sorted(caused) == sorted(REASONS)
    assert set(elsewhere) >= PASSED_ON


@pytest.mark.parametrize("path", ELSEWHERE)
def test_what_is_caused_elsewhere_is_caused_by_the_test_that_is_named(path: str) -> None:
    module = Module(ROOT / path)
    for test, codes in ELSEWHERE[path].items():
        assert module.collects(test), test
        assert {code for code in codes if not module.mentions(test, code)} == set(), test


def test_a_code_that_only_another_test_of_a_module_mentions_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "test_it.py"
    path.write_text(
        "CODES = ('no_workers',)\n"
        "def asked(): return CODES\n"
        "def test_one(): \"queue_full\"; assert asked() == 'wait_too_long'\n"
        "def test_other(): assert 'shed'\n"
        "async def helper(): assert 'shed'\n"
        "class TestIn:\n    def test_three(self): assert 'shed'\n"
    )
    module = Module(path)
    assert [module.collects(name) for name in ("test_one", "test_three", "helper", "test_none")] == [
        True, False, False, False,
    ]  # fmt: skip
    told = ("no_workers", "wait_too_long", "queue_full", "shed", "workers")
    assert [module.mentions("test_one", code) for code in told] == [True, True, False, False, False]


async def test_what_a_client_causes_is_answered_as_the_table_says(
    start: Callable[..., Any], secured: dict[str, Any]
) -> None:
    edge = await start(**secured)
    for code, data in CAUSED.items():
        reply = await edge.raw(data)
        error = json.loads(reply.body)["error"]
        assert (code, reply.status) == (error["code"], REASONS[code].status)
        assert error["message"], code
        assert reply.headers["x-request-id"], code
        assert ("param" in error, b"secret" in reply.body) == (True, False), code


async def test_what_an_open_gateway_and_a_full_one_refuse_is_answered_as_the_table_says(
    start: Callable[..., Any],
) -> None:
    edge = await start(max_connections_per_client=1, trusted_proxies=())
    # The first connection stays open.
    replies = {"origin_not_allowed": await edge.raw(FROM_ELSEWHERE)}
    reader, _ = await edge.connect()
    replies["too_many_client_connections"] = await edge.read(reader)
    assert set(replies) == CAUSED_OPEN
    for code, reply in replies.items():
        assert (json.loads(reply.body)["error"]["code"], reply.status) == (code, REASONS[code].status)


@pytest.mark.parametrize("streamed", [False, True])
async def test_what_router_and_workers_say_is_answered_as_the_table_says(edge: Any, streamed: bool) -> None:
    body = json.dumps(chat(stream=streamed)).encode()
    for code in sorted(PASSED_ON):
        kind: type[KvasirError] = CapacityError if REASONS[code].status in (429, 503) else UpstreamError
        said = kind("It is so.", code=code)
        edge.router.refusal = said
        refused = await edge.post(CHAT, body)
        edge.router.refusal = None
        edge.router.script = lambda stream, said=said: stream.fail(said)
        failed = await edge.post(CHAT, body)
        for reply in (refused, failed):
            error = json.loads(reply.body)["error"]
            assert (reply.status, error["code"]) == (REASONS[code].status, code)
            assert (kind is CapacityError) is ("retry-after" in reply.headers), code
