"""Every problem of an invalid kvasir.yaml is reported: file, line, column, field, found, expected."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvasir.config.checks.problems import Problem, SpecError
from kvasir.config.load.loader import dump, load, loads, schema
from kvasir.config.load.yaml_document import MAX_BYTES, render
from kvasir.config.spec.deployment import Deployment
from kvasir.core.errors import ConfigError
from kvasir.core.requests import Role

ROOT = Path(__file__).resolve().parents[3]


def problems(text: str, *overrides: str) -> tuple[Problem, ...]:
    with pytest.raises(SpecError) as caught:
        loads(text, "kvasir.yaml", overrides)
    return caught.value.problems


# (yaml, line, column, field, part of found, part of expected)
BAD = {
    "unknown field": ("modle: {}", 1, 1, "modle", "unknown field 'modle'", "'model', perhaps"),
    "unknown nested field": (
        "pools:\n- name: a\n  role: both\n  engine:\n    blocksize: 64\n",
        5,
        5,
        "pools[0].engine.blocksize",
        "unknown field",
        "'block_size', perhaps",
    ),
    "unknown field like no other": ("zzz: 1", 1, 1, "zzz", "unknown field", "one of: version, name, model"),
    "text for a number": ("gateway:\n  port: '80'", 2, 9, "gateway.port", '"80" (text)', "a whole number"),
    "boolean for a number": ("gateway:\n  port: true", 2, 9, "gateway.port", "true", "from 0 to 65535"),
    "fraction for a whole number": ("gateway: {port: 1.5}", 1, 17, "gateway.port", "1.5", "a whole number"),
    "number too large": ("gateway: {port: 70000}", 1, 17, "gateway.port", "70000", "from 0 to 65535"),
    "number too small": ("routing:\n  max_queue: 0", 2, 14, "routing.max_queue", "0", "at least 1"),
    "zero where more is needed": ("transfer: {lease_s: 0}", 1, 21, "transfer.lease_s", "0", "above 0"),
    "word outside the choices": (
        "disaggregation: sometimes",
        1,
        17,
        "disaggregation",
        '"sometimes" (text)',
        "one of: always, auto, never",
    ),
    "yes is text": (
        "pools:\n- {name: a, role: both, engine: {prefix_caching: yes}}",
        2,
        50,
        "pools[0].engine.prefix_caching",
        '"yes" (text)',
        "true or false",
    ),
    "wrong role": (
        "pools:\n- name: a\n  role: prefil",
        3,
        9,
        "pools[0].role",
        "prefil",
        "prefill, decode, both",
    ),
    "missing field": ("pools:\n  - name: a", 2, 5, "pools[0].role", "nothing", "one of: prefill"),
    "no pools": ("pools: []", 1, 8, "pools", "an empty list", "a list of at least 1"),
    "mapping for a list": ("pools: {a: 1}", 1, 8, "pools", "a mapping", "a list"),
    "list for a mapping": ("model: [a]", 1, 8, "model", "a list of 1", "a mapping of fields"),
    "list for the file": ("- a", 1, 1, "", "a list of 1", "a mapping of fields"),
    "null where a value is needed": ("model:\n  source: ~", 2, 11, "model.source", "null", "text"),
    "bad name": ("name: My Name", 1, 7, "name", '"My Name"', "that matches"),
    "wrong version": ("version: kvasir/v9", 1, 10, "version", "kvasir/v9", "kvasir/v1"),
    "duplicate key": ("name: a\nmodel: {}\nname: b", 3, 1, "name", "first on line 1", "one value"),
    "duplicate nested key": (
        "model:\n  source: a\n  source: b",
        3,
        3,
        "model.source",
        "first on line 2",
        "one",
    ),
    "syntax": ("model: [1,", 1, 11, "", "expected the node content", "valid YAML"),
    "bad indentation": ("model:\n  source: a\n dtype: b", 3, 2, "", "expected <block end>", "valid YAML"),
    "tab": ("model:\n\tsource: a", 2, 1, "", "cannot start any token", "valid YAML"),
    "foreign tag": ("name: !!python/name:os.system x", 1, 7, "name", "python/name:os.system", "without tags"),
    "second document": ("name: a\n---\nname: b", 2, 1, "", "a second document", "one YAML document"),
    "control character": ("name: \x07", 1, 7, "", "#x07", "printable text"),
    "list as a key": ("? [a]\n: 1", 1, 3, "", "a list or mapping as a key", "a field name"),
    "number beyond a float": ("transfer: {lease_s: 1e999}", 1, 21, "transfer.lease_s", "1e999", "!!float"),
    "alias of nothing": ("model: *m", 1, 8, "", "undefined alias", "valid YAML"),
    "always without a decode pool": (
        "# a comment\ndisaggregation: always\npools:\n- {name: a, role: prefill}",
        2,
        17,
        "disaggregation",
        "always",
        "add the missing pool",
    ),
    "never with pools apart": (
        "disaggregation: never\npools:\n- {name: a, role: prefill}",
        1,
        17,
        "disaggregation",
        "never",
        "needs a pool of role both; add one, as in `pools: [{name: serve, role: both}]`",
    ),
    "open host without keys": ("gateway:\n  host: 0.0.0.0", 2, 9, "gateway.host", "0.0.0.0", "api_keys_file"),
    "speculation out of order": (
        "pools:\n- name: a\n  role: both\n  engine: {speculative: {lookup_max: 1, lookup_min: 3}}",
        4,
        53,
        "pools[0].engine.speculative.lookup_min",
        "3",
        "must not exceed lookup_max",
    ),
    "a draft for prompt lookup": (
        "pools:\n- name: a\n  role: both\n  engine: {speculative: {model: b}}",
        4,
        33,
        "pools[0].engine.speculative.model",
        '"b"',
        "set method to draft_model",
    ),
    "a draft model without a model": (
        "pools:\n- name: a\n  role: both\n  engine: {speculative: {method: eagle3}}",
        4,
        12,
        "pools[0].engine.speculative.model",
        "nothing (the default)",
        "eagle3 needs the folder or Hugging Face id of its draft",
    ),
    "pools that cannot exchange KV": (
        "pools:\n- {name: a, role: prefill}\n- {name: b, role: decode, engine: {block_size: 64}}",
        2,
        1,
        "pools",
        "a list of 2",
        "engine.block_size is 32 and 64",
    ),
    "pools of unlike engines": (
        "pools:\n- {name: a, role: prefill}\n- {name: b, role: decode, engine: {kind: sim}}",
        2,
        1,
        "pools",
        "a list of 2",
        "engine.kind is vllm and sim; make them equal",
    ),
    "pools whose ranks do not share heads": (
        "pools:\n- {name: a, role: prefill, engine: {tensor_parallel_size: 2}}\n"
        "- {name: b, role: decode, engine: {tensor_parallel_size: 3}}",
        2,
        1,
        "pools",
        "a list of 2",
        "engine.tensor_parallel_size 2 and 3 cannot exchange KV; choose sizes so that each divides the next",
    ),
    "two adapters of one name": (
        "lora: [{name: a, path: x}, {name: a, path: y}]",
        1,
        7,
        "lora",
        "a list of 2",
        "names must differ, found ['a', 'a']",
    ),
    "an adapter named as the model": (
        "model: {served_name: chat}\nlora: [{name: chat, path: x}]",
        2,
        7,
        "lora",
        "a list of 1",
        "'chat' is also the served name of the model",
    ),
    "a pull that may outlast its lease": (
        "transfer: {lease_s: 2, timeout_s: 3}",
        1,
        35,
        "transfer.timeout_s",
        "3",
        "lower timeout_s or raise lease_s",
    ),
    "a lease shorter than the default pull": (
        "transfer: {lease_s: 2}",
        1,
        1,
        "transfer.timeout_s",
        "nothing (the default)",
        "timeout_s 5 exceeds lease_s 2",
    ),
    "an endpoint of no pool": (
        "discovery: {kind: static, endpoints: ['decode=h:1', 'encode=h:2']}",
        1,
        12,
        "discovery",
        "a mapping",
        "'encode=h:2' names unknown pool 'encode'; the pools are prefill, decode",
    ),
    "a collector without a port": (
        "telemetry: {otlp_endpoint: collector}",
        1,
        28,
        "telemetry.otlp_endpoint",
        '"collector"',
        "host:port, http://host:port or https://host:port",
    ),
    "a Redis on a port that does not exist": (
        "tiers: {redis: {url: 'redis://kv.example:99999/0'}}",
        1,
        22,
        "tiers.redis.url",
        "99999",
        "0-65535",
    ),
    "a Redis on a host that does not exist": (
        f"tiers: {{redis: {{url: 'redis://{'k' * 64}.example:6379/0'}}}}",
        1,
        22,
        "tiers.redis.url",
        "kkkk",
        "label",
    ),
}


@pytest.mark.parametrize("case", BAD.values(), ids=BAD.keys())
def test_a_bad_file_names_line_column_field_found_and_expected(
    case: tuple[str, int, int, str, str, str],
) -> None:
    text, line, column, field, found, expected = case
    (problem,) = problems(text)
    assert (problem.file, problem.line, problem.column, problem.field) == ("kvasir.yaml", line, column, field)
    assert found in problem.found
    assert expected in problem.expected


@pytest.mark.parametrize(
    "endpoint",
    ["localhost:4317", "http://otel-collector.obs.svc:4317", "https://10.0.0.1:443", "http://[::1]:4317"],
)
def test_a_collectors_address_may_be_bare_or_a_url(endpoint: str) -> None:
    assert load(None, [f"telemetry.otlp_endpoint='{endpoint}'"]).telemetry.otlp_endpoint == endpoint


@pytest.mark.parametrize(
    "endpoint",
    ["", "h", ":4317", "h:0", "h:65536", "grpc://h:1", "http://h", "h:1/v1/traces", "h:1 ", "-h:1"],
)
def test_what_is_no_collectors_address_is_refused(endpoint: str) -> None:
    (problem,) = problems("", f"telemetry.otlp_endpoint='{endpoint}'")
    assert problem.field == "telemetry.otlp_endpoint"
    assert "host:port" in problem.expected


@pytest.mark.parametrize("tier", ["disk: {path: /kv, ", "redis: {url: 'redis://h:1/0', "])
def test_a_tier_s_question_may_not_outlast_its_reads(tier: str) -> None:
    (problem,) = problems(f"tiers: {{{tier}lookup_timeout_s: 2, timeout_s: 0.5}}}}")
    assert problem.field.endswith(".lookup_timeout_s")
    assert problem.expected == "lookup_timeout_s 2 exceeds timeout_s 0.5; lower it"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
def test_a_gateway_on_loopback_asks_for_no_keys(host: str) -> None:
    assert load(None, [f"gateway.host='{host}'"]).gateway.host == host


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "gateway: {console: {port: 8001, host: 10.0.0.1}}",
            "console.host 10.0.0.1 is reachable from the network",
        ),
        ("gateway: {port: 8001, console: {port: 8001}}", "console.port 8001 is the port of the gateway"),
    ],
)
def test_the_console_s_own_port_is_guarded_as_the_gateway_s_is(text: str, said: str) -> None:
    (problem,) = problems(text)
    assert said in problem.expected


def test_all_problems_of_a_file_are_listed_at_once_in_its_order() -> None:
    text = "gateway: {port: x}\npools:\n- {name: a, role: b, colour: red}\nrouting: {max_queue: 0}"
    found = problems(text)
    assert [(p.line, p.field) for p in found] == [
        (1, "gateway.port"),
        (3, "pools[0].role"),
        (3, "pools[0].colour"),
        (4, "routing.max_queue"),
    ]


def test_the_message_shows_each_place_as_terminals_link_it() -> None:
    with pytest.raises(ConfigError, match=r"kvasir\.yaml:1:17  gateway\.port\n +found +70000\n +expected +a"):
        loads("gateway: {port: 70000}", "kvasir.yaml")


def test_a_long_list_of_problems_is_cut() -> None:
    with pytest.raises(SpecError) as caught:
        loads("\n".join(f"unknown{i}: 1" for i in range(200)), "kvasir.yaml")
    assert len(caught.value.problems) == 200
    assert caught.value.message.endswith("and 175 more")


@pytest.mark.parametrize(
    "bomb",
    [
        "a: &a [x, x, x, x, x, x, x, x, x, x]\n"
        + "\n".join(
            f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join(['*' + chr(97 + i)] * 10)}]" for i in range(8)
        ),
        "a: &a [*a]",
        "a: &a {b: *a}",
        "[" * 1000,
        "a:\n" + "".join(" " * i + "a:\n" for i in range(1, 60)),
    ],
    ids=["billion laughs", "list within itself", "mapping within itself", "deep flow", "deep block"],
)
def test_a_file_that_would_grow_or_nest_without_end_is_refused(bomb: str) -> None:
    text = " ".join(p.found + p.expected for p in problems(bomb))
    assert "larger document" in text or "levels of nesting" in text


def test_a_file_beyond_the_size_limit_is_refused_before_it_is_parsed(tmp_path: Path) -> None:
    path = tmp_path / "kvasir.yaml"
    path.write_text("#" * (MAX_BYTES + 1))
    with pytest.raises(SpecError, match="larger file"):
        load(path)


def test_unreadable_files_say_why(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="no such file"):
        load(tmp_path / "absent.yaml")
    with pytest.raises(SpecError, match="a folder"):
        load(tmp_path)
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"name: a\nmodel: \xff")
    with pytest.raises(SpecError) as caught:
        load(binary)
    (problem,) = caught.value.problems
    assert (problem.line, problem.column, problem.found) == (2, 8, "byte 0xff")


def test_no_file_an_empty_file_and_a_comment_are_the_embedded_default() -> None:
    assert load() == loads("", "x") == loads("# nothing\n", "x") == Deployment()


def test_anchors_and_merge_keys_share_settings_between_pools() -> None:
    text = (
        "pools:\n- name: a\n  role: prefill\n  engine: &e {block_size: 64, seed: 1}\n"
        "- name: b\n  role: decode\n  engine: {<<: *e, seed: 2}\n"
    )
    first, second = loads(text, "x").pools
    assert (first.engine.block_size, second.engine.block_size) == (64, 64)
    assert (first.engine.seed, second.engine.seed) == (1, 2)


def test_scalars_follow_yaml_1_2() -> None:
    text = (
        "name: on\nmodel: {source: 12:30:00, revision: 'null', served_name: 2001-01-01, max_model_len: 0x400}"
    )
    deployment = loads(text, "x")
    assert (deployment.name, deployment.model.source) == ("on", "12:30:00")
    assert deployment.model.served_name == "2001-01-01"
    assert deployment.model.max_model_len == 1024
    assert loads("transfer: {lease_s: 2e1}", "x").transfer.lease_s == 20.0


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("gateway.port=9", lambda d: d.gateway.port == 9),
        ("pools.decode.replicas=3", lambda d: d.pool("decode").replicas == 3),
        ("pools.0.engine.block_size=32", lambda d: d.pools[0].engine.block_size == 32),
        ("model.served_name=null", lambda d: d.model.served_name is None),
        ("model.source=/a/b", lambda d: d.model.name == "b"),
        ("lora=[{name: x, path: y}]", lambda d: d.lora[0].path == "y"),
        ("pools.decode.engine.speculative.tokens=2", lambda d: d.pools[1].engine.speculative.tokens == 2),
    ],
)
def test_an_override_changes_one_field_and_keeps_the_default_pools(override: str, value: object) -> None:
    deployment = load(None, [override])
    assert callable(value)
    assert value(deployment)
    assert [pool.role for pool in deployment.pools] == [Role.PREFILL, Role.DECODE]


@pytest.mark.parametrize(
    ("text", "overrides"),
    [
        ("", ["disaggregation=never"]),
        ("disaggregation: never", []),
        ("", ["disaggregation=never", "pools.serve.engine.block_size=64"]),
        ("", ["pools.serve.engine.block_size=64", "disaggregation=never"]),
        ("disaggregation: never", ["pools.serve.engine.block_size=64"]),
    ],
)
def test_without_disaggregation_the_default_is_one_pool_of_both_roles(
    text: str, overrides: list[str]
) -> None:
    (pool,) = loads(text, "t.yaml", overrides).pools
    assert (pool.name, pool.role, pool.replicas) == ("serve", Role.BOTH, 1)
    assert pool.engine.block_size == (64 if any("block_size" in each for each in overrides) else 32)


def test_an_override_that_names_a_pool_of_the_default_pair_keeps_the_pair() -> None:
    pools = load(None, ["disaggregation=never", "pools.prefill.role=both"]).pools
    assert [(pool.name, pool.role) for pool in pools] == [("prefill", Role.BOTH), ("decode", Role.DECODE)]


@pytest.mark.parametrize(
    ("override", "field", "expected"),
    [
        ("gateway.port=x", "gateway.port", "a whole number"),
        ("gateway.prot=1", "gateway.prot", "'port', perhaps"),
        ("pools.encode.replicas=1", "pools", "an index below 2 or one of: prefill, decode"),
        ("pools.7.replicas=1", "pools", "an index below 2"),
        ("gateway.port", "", "key.path=value"),
        ("=1", "", "key.path=value"),
        ("gateway..port=1", "", "key.path=value"),
    ],
)
def test_a_bad_override_is_shown_as_it_was_written(override: str, field: str, expected: str) -> None:
    (problem,) = problems("name: a", override)
    assert problem.file == f"--set {override}"
    assert problem.field == field
    assert expected in problem.expected


def test_an_override_wins_over_the_file_and_a_later_one_over_an_earlier() -> None:
    assert loads("gateway: {port: 1}", "x", ["gateway.port=2", "gateway.port=3"]).gateway.port == 3


def test_a_dumped_deployment_loads_as_itself() -> None:
    deployment = load(None, ["pools.decode.replicas=3", "model.dtype=float32"])
    assert loads(dump(deployment), "x") == deployment
    assert loads(render(json.loads(dump(deployment))), "x") == deployment


def test_the_committed_schema_is_fresh() -> None:
    committed = json.loads((ROOT / "docs" / "kvasir.schema.json").read_text())
    assert committed == schema(), "run `make pages`"


EXAMPLES = sorted((ROOT / "deploy" / "examples").glob("*.yaml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_every_example_is_valid(path: Path) -> None:
    load(path)


def test_the_examples_cover_every_way_to_disaggregate() -> None:
    deployments = [load(path) for path in EXAMPLES]
    assert {d.disaggregation for d in deployments} == {"always", "auto", "never"}
    assert any(
        pool.gpus == "auto" and pool.engine.tensor_parallel_size > 1 for d in deployments for pool in d.pools
    )


def test_the_default_example_is_the_embedded_default() -> None:
    assert load(ROOT / "deploy" / "examples" / "default.yaml") == Deployment()
