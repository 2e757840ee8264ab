"""Callers: from headers to a tenant, with the permissions, labels and cost of its requests."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from prometheus_client import CollectorRegistry

from kvasir.config.load.loader import load
from kvasir.config.spec.deployment import Deployment
from kvasir.config.spec.tenants import PRIORITY_SPAN
from kvasir.core.errors import KvasirError, RequestError
from kvasir.telemetry.metrics import Metrics
from kvasir.telemetry.reasons import http_status
from kvasir.telemetry.tenant_series import RateLimitStats, TenantStats, TenantUsage
from kvasir_platform.gateway.http.errors import error_body, error_headers
from kvasir_platform.gateway.tenants.caller import Caller, Charge, LimitReached
from kvasir_platform.gateway.tenants.callers import Callers, make_callers
from kvasir_platform.gateway.tenants.salts import salt_secret

NOW_S = 1_800_000_000.0
CLIENT_SALT = "my-own-salt"
TENANTS = """[
  {name: red, requests_per_min: 2, tokens_per_min: 1000, concurrency: 2, max_context_tokens: 100,
   max_output_tokens: 40, weight: 3, priority: batch, models: [base], slo: [fast], cache: 'shared:lab'},
  {name: blue, cache: 'shared:lab', operator: true},
  {name: green, requests_per_min: 60},
]"""


class Clock:
    """Time that stands still until it is set; sleeping takes a turn of the loop."""

    def __init__(self) -> None:
        self.at = 100.0
        self.slept: list[float] = []

    def now(self) -> float:
        return self.at

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await asyncio.sleep(0)


def deployment(folder: Path, *overrides: str) -> Deployment:
    """Tenants red, blue and green, each with a key of its own name, and `free`, a key of no tenant."""
    lines = [f"{hashed(name)} tenant={name}" for name in ("red", "blue", "green")]
    (folder / "keys").write_text("\n".join([*lines, hashed("free")]))
    (folder / "secret").write_text("0" * 64)
    options = [
        "model.served_name=base",
        "lora=[{name: tuned, path: /x}]",
        "slo=[{name: default}, {name: fast, ttft_s: 0.5}]",
        f"tenancy={{tenants: {TENANTS}, cache_secret_file: {folder / 'secret'}}}",
        f"gateway.api_keys_file={folder / 'keys'}",
    ]
    return load(None, [*options, *overrides])


def hashed(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def callers(spec: Deployment, clock: Clock) -> Callers:
    return make_callers(spec, clock, lambda: NOW_S, random.Random(7), {}, secret=salt_secret(spec))


def of(made: Callers, key: str) -> Caller:
    return made.of({b"authorization": f"Bearer {key}".encode()})


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def made(tmp_path: Path, clock: Clock) -> Callers:
    return callers(deployment(tmp_path), clock)


@pytest.fixture
def red(made: Callers) -> Caller:
    return of(made, "red")


class Receiver:
    """Keeps what it is answered."""

    def __init__(self) -> None:
        self.answers: list[Charge | BaseException] = []

    def admitted(self, charge: Charge) -> None:
        self.answers.append(charge)

    def failed(self, error: BaseException) -> None:
        self.answers.append(error)


def ask(caller: Caller, tokens: int) -> Charge | KvasirError:
    receiver = Receiver()
    caller.admit(tokens, receiver)
    [answer] = receiver.answers
    assert isinstance(answer, Charge | KvasirError)
    return answer


def charged(caller: Caller, tokens: int) -> Charge:
    answer = ask(caller, tokens)
    assert isinstance(answer, Charge)
    return answer


def refused(caller: Caller, tokens: int) -> KvasirError:
    answer = ask(caller, tokens)
    assert isinstance(answer, KvasirError)
    return answer


def code(caught: pytest.ExceptionInfo[RequestError]) -> tuple[int, str, str | None]:
    return caught.value.status, caught.value.code, caught.value.param


def test_a_key_names_its_tenant_and_one_of_no_tenant_the_default(made: Callers) -> None:
    assert [of(made, key).tenant for key in ("red", "blue", "free")] == ["red", "blue", "default"]
    for headers in ({}, {b"authorization": b"Bearer wrong"}):
        with pytest.raises(RequestError) as caught:
            made.of(headers)
        assert code(caught) == (401, "invalid_api_key", None)


def test_where_no_keys_are_asked_for_all_are_the_default_tenant_without_limits(clock: Clock) -> None:
    caller = callers(load(None), clock).of({})
    assert (caller.tenant, caller.operator, caller.weight) == ("default", True, 1.0)
    assert charged(caller, 10**9).header_lines == b""
    assert (caller.salt(), caller.salt("x")) == ("", "x")
    caller.check_model("anything")
    caller.check_size(10**6, 10**6, "prompt")


def test_the_default_tenant_can_be_limited_too(clock: Clock) -> None:
    made = callers(load(None, ["tenancy.tenants=[{name: default, concurrency: 1}]"]), clock)
    caller = made.of({})
    assert not caller.operator
    charged(caller, 1)
    assert refused(caller, 1).code == "concurrency_limit"


def test_a_model_that_is_not_for_a_tenant_does_not_exist_for_it(made: Callers, red: Caller) -> None:
    red.check_model("base")
    with pytest.raises(RequestError, match="'tuned' does not exist here") as caught:
        red.check_model("tuned")
    assert code(caught) == (404, "model_not_found", "model")
    of(made, "blue").check_model("tuned")


def test_sizes_are_bounded_by_the_tenant_and_the_field_is_named(red: Caller) -> None:
    red.check_size(60, 40, "prompt")
    red.check_size(99, None, "prompt")
    for prompt, output, expected in (
        (1, 41, ("output_limit_exceeded", "max_tokens")),
        (61, 40, ("context_length_exceeded", "messages")),
        (100, None, ("context_length_exceeded", "messages")),
    ):
        with pytest.raises(RequestError) as caught:
            red.check_size(prompt, output, "messages")
        assert code(caught) == (400, *expected)
    assert (red.context(4096), red.context(64)) == (100, 64)
    assert (red.default_output(256), red.default_output(16)) == (40, 16)


def test_only_an_operator_may_see_and_steer_the_deployment(made: Callers, red: Caller) -> None:
    for key in ("blue", "free"):
        of(made, key).check_operator()
    with pytest.raises(RequestError) as caught:
        red.check_operator()
    assert code(caught) == (403, "operator_only", None)


def test_what_a_client_asks_for_never_leaves_its_tenants_class(made: Callers, red: Caller) -> None:
    asked = (None, -5, 0, 1, 999, 1000, 10**9, -(10**9))
    assert [red.priority(each) for each in asked] == [2000, 2000, 2000, 2001, 2999, 2999, 2999, 2000]
    assert {red.priority(each) // PRIORITY_SPAN for each in asked} == {2}
    assert of(made, "blue").priority(7) // PRIORITY_SPAN == 1


def test_a_tenant_asks_for_its_own_slo_classes_only(made: Callers, red: Caller) -> None:
    assert red.slo.asked_for({}).name == "fast"
    with pytest.raises(RequestError, match="the classes are: fast"):
        red.slo.asked_for({b"x-kvasir-slo": b"default"})
    assert of(made, "blue").slo.asked_for({}).name == "default"


def test_caches_are_apart_but_within_a_group(made: Callers, red: Caller) -> None:
    blue, green, free = (of(made, key) for key in ("blue", "green", "free"))
    assert red.salt() == blue.salt()
    assert red.salt("x") == blue.salt("x") != red.salt()
    assert len({red.salt(), green.salt(), free.salt(), red.salt("x"), green.salt("x")}) == 5


def test_a_request_is_charged_what_it_may_use_and_settled_to_what_it_used(red: Caller, clock: Clock) -> None:
    charge = charged(red, 900)
    assert b"x-ratelimit-remaining-tokens: 100\r\n" in charge.header_lines
    assert b"x-ratelimit-remaining-requests: 1\r\n" in charge.header_lines
    assert refused(red, 200).code == "rate_limit_tokens"
    charge.settle(50, 10)
    charge.settle(50, 10)
    charge.release()
    assert b"x-ratelimit-remaining-tokens: 740\r\n" in charged(red, 200).header_lines


def test_what_never_ran_costs_nothing(red: Caller) -> None:
    for _ in range(10):
        charge = charged(red, 1000)
        charge.release()
        charge.settle(1000, 1000)


@pytest.mark.parametrize(
    ("tokens", "before", "expected"),
    [
        ((10, 10), (), ("rate_limit_requests", "2 requests a minute")),
        ((600,), (), ("rate_limit_tokens", "1000 tokens a minute")),
        ((1, 1), (0, 1), ("concurrency_limit", "2 requests at the same time")),
    ],
    ids=["requests", "tokens", "concurrency"],
)
def test_a_limit_says_which_it_is_how_it_stands_and_when_to_come_back(
    tmp_path: Path, clock: Clock, tokens: Sequence[int], before: Sequence[int], expected: tuple[str, str]
) -> None:
    options = ["tenancy.tenants.red.requests_per_min=100"] if before else []
    red = of(callers(deployment(tmp_path, *options), clock), "red")
    charges = [charged(red, each) for each in tokens]
    if not before:
        for charge, each in zip(charges, tokens, strict=True):
            charge.settle(each, 0)
    error = refused(red, 500)
    assert isinstance(error, LimitReached)
    assert error.code == expected[0]
    assert expected[1] in error.message
    assert http_status(error) == 429
    assert b'"type":"rate_limit_error"' in error_body(error)
    lines = error_headers(error)
    assert b"retry-after: " in lines
    assert b"x-ratelimit-limit-requests: " in lines
    assert b"x-ratelimit-remaining-tokens: " in lines
    clock.at += error.retry_after_s
    if before:
        charges[0].settle(1, 0)
    charged(red, 500)


def test_a_request_that_can_never_fit_is_told_so_instead_of_to_wait(red: Caller) -> None:
    error = refused(red, 1001)
    assert isinstance(error, RequestError)
    assert (error.status, error.code) == (400, "token_limit_too_small")
    charged(red, 1000)


def test_what_tenants_use_is_counted_and_shown(made: Callers, red: Caller) -> None:
    charged(red, 100).settle(60, 7)
    charged(red, 100)
    refused(red, 1)
    of(made, "blue").admit(1, Receiver())
    figures = made.figures()
    assert figures.limits is None
    assert {use.tenant: use for use in figures.tenants} == {
        "red": TenantUsage("red", 2, 60, 7, 1, {"rate_limit_requests": 1}),
        "blue": TenantUsage("blue", 1, 0, 0, 1),
        "green": TenantUsage("green"),
        "default": TenantUsage("default"),
    }
    metrics = Metrics(CollectorRegistry(), ())
    metrics.track_tenants(
        lambda: TenantStats(figures.tenants, RateLimitStats(shared=False, local_decisions=3))
    )
    page = metrics.render().decode()
    for line in (
        'kvasir_tenant_requests_total{tenant="red"} 2.0',
        'kvasir_tenant_tokens_total{kind="output",tenant="red"} 7.0',
        'kvasir_tenant_refused_total{reason="rate_limit_requests",tenant="red"} 1.0',
        'kvasir_tenant_requests_in_flight{tenant="blue"} 1.0',
        "kvasir_rate_limits_shared 0.0",
        "kvasir_rate_limits_local_decisions_total 3.0",
    ):
        assert line in page


async def test_changed_keys_are_taken_over_while_it_runs(tmp_path: Path, clock: Clock) -> None:
    made = callers(deployment(tmp_path), clock)
    running = asyncio.create_task(made.run())
    (tmp_path / "keys").write_text(f"{hashed('next')} tenant=red")
    async with asyncio.timeout(30):
        while True:
            try:
                assert of(made, "next").tenant == "red"
                break
            except RequestError:
                await asyncio.sleep(0.001)
    with pytest.raises(RequestError):
        of(made, "red")
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert set(clock.slept) == {1.0}


def test_neither_keys_nor_salts_are_in_logs_errors_or_what_is_printed(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    made = callers(deployment(tmp_path), clock)
    red = of(made, "red")
    red.salt(CLIENT_SALT)
    shown = [repr(made), repr(red), repr(charged(red, 1)), repr(made.figures())]
    for headers in ({b"authorization": b"Bearer sk-leak"}, {b"authorization": b"sk-leak"}):
        with pytest.raises(RequestError) as caught:
            made.of(headers)
        shown.append(repr(error_body(caught.value)) + repr(error_headers(caught.value)))
    for error in (
        refused(red, 1001),
        *[answer for _ in range(3) if isinstance(answer := ask(red, 1), KvasirError)],
    ):
        shown.append(repr(error_body(error)) + repr(error_headers(error)))
    everything = "\n".join([*shown, caplog.text])
    for secret in ("sk-leak", hashed("sk-leak"), hashed("red"), CLIENT_SALT, red.salt(), "0" * 64):
        assert secret not in everything


def test_a_call_that_no_limit_would_let_in_is_refused_before_its_body_is_read(
    made: Callers, clock: Clock
) -> None:
    green = of(made, "green")
    green.check_open(1)
    for _ in range(60):
        charged(green, 1)
    first = refused(green, 1)
    with pytest.raises(LimitReached) as caught:
        green.check_open(1)
    assert (caught.value.code, http_status(caught.value)) == (first.code, 429) == ("rate_limit_requests", 429)
    assert caught.value.header_lines == getattr(first, "header_lines", b"")
    assert green.use.refused == {"rate_limit_requests": 2}
    clock.at += 0.5
    with pytest.raises(LimitReached):
        green.check_open(1)
    clock.at += 0.5
    green.check_open(1)
    charged(green, 1)


def test_a_decision_is_forgotten_when_another_router_may_have_changed_it(clock: Clock) -> None:
    made = callers(load(None, ["tenancy.tenants=[{name: default, tokens_per_min: 60}]"]), clock)
    caller = made.of({})
    spent = charged(caller, 60)
    with pytest.raises(LimitReached, match="tokens a minute"):
        caller.check_open(1)
    caller.check_open(0)
    spent.settle(10, 0)
    caller.check_open(1)
    charged(caller, 50).settle(60, 60)
    assert refused(caller, 1).code == "rate_limit_tokens"
    for tokens in (0, 1):
        with pytest.raises(LimitReached):
            caller.check_open(tokens)
    clock.at += 1.1
    caller.check_open(1)


def test_bytes_of_bodies_are_a_bucket_that_refills(clock: Clock) -> None:
    made = callers(load(None, ["tenancy.tenants=[{name: default, body_bytes_per_min: 600}]"]), clock)
    caller = made.of({})
    caller.charge_body(500)
    caller.check_body(100)
    for refuses in (caller.check_body, caller.charge_body):
        with pytest.raises(LimitReached) as caught:
            refuses(200)
        assert caught.value.code == "rate_limit_bytes"
        assert caught.value.retry_after_s == pytest.approx(10.0)
    assert caller.use.refused == {"rate_limit_bytes": 2}
    clock.at += 10.0
    caller.charge_body(200)
    with pytest.raises(RequestError) as large:
        caller.check_body(601)
    assert (large.value.status, large.value.code) == (413, "body_too_large")


def test_a_tenant_whose_places_are_all_taken_is_refused_until_one_is_free(red: Caller) -> None:
    first, _ = charged(red, 1), charged(red, 1)
    with pytest.raises(LimitReached) as caught:
        red.check_open(1)
    assert caught.value.code == "concurrency_limit"
    first.settle(1, 0)
    red.check_open(1)


class Parallel(RuleBasedStateMachine):
    """Calls of one tenant that run at the same time, and end in every way in which calls end."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        spec = load(None, ["tenancy.tenants=[{name: default, tokens_per_min: 1000, requests_per_min: 50}]"])
        self.caller = callers(spec, self.clock).of({})
        self.open: list[tuple[int, Charge]] = []
        self.ended: list[Charge] = []
        self.used = 0
        self.requests = 0

    @rule(tokens=st.integers(0, 1000))
    def call(self, tokens: int) -> None:
        answer = ask(self.caller, tokens)
        reserved = sum(amount for amount, _ in self.open)
        fits = self.used + reserved + tokens <= 1000 and self.requests + len(self.open) < 50
        assert isinstance(answer, Charge) == fits
        if isinstance(answer, Charge):
            self.open.append((tokens, answer))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def ends(self, data: st.DataObject) -> None:
        """With all of its output, with a part of it because it was cancelled, or without having run."""
        reserved, charge = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        if data.draw(st.booleans()):
            prompt = data.draw(st.integers(0, reserved))
            output = data.draw(st.integers(0, reserved - prompt))
            charge.settle(prompt, output)
            self.used += prompt + output
            self.requests += 1
        else:
            charge.release()
        self.ended.append(charge)

    @precondition(lambda self: self.ended)
    @rule(data=st.data())
    def ends_again(self, data: st.DataObject) -> None:
        """A second end, as of a cancelled call whose last delta comes later, changes nothing."""
        charge = data.draw(st.sampled_from(self.ended))
        charge.release()
        charge.settle(500, 500)

    @invariant()
    def what_is_left_is_what_was_not_used(self) -> None:
        assert self.caller.use.running == len(self.open)
        reserved = sum(amount for amount, _ in self.open)
        if self.requests + len(self.open) < 50:
            answer = ask(self.caller, 1000 - self.used - reserved)
            assert isinstance(answer, Charge)
            answer.release()


TestParallel = Parallel.TestCase
TestParallel.settings = settings(stateful_step_count=40, max_examples=30, deadline=None)
