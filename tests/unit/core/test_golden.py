"""Golden prompts: both sides compute the same, and every difference is named and shown."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import replace

import pytest

from kvasir.core.golden import (
    GOLDEN_CASES,
    MAX_TEXT_BYTES,
    GoldenPrompt,
    Message,
    Tool,
    golden_conflicts,
    golden_date,
    golden_prompts,
)
from kvasir.core.identity import KvLayout, WorkerIdentity, registration_conflicts
from kvasir.core.requests import Role, token_ids

OURS = (
    GoldenPrompt("chat", "<bos>user: hi there, how are you today? assistant:", 9, 0xA1),
    GoldenPrompt("chat_tools", "<bos>tools user: hi assistant:", 7, 0xB2),
    GoldenPrompt("completion", "once", 1, 0xC3),
)


def render(messages: Sequence[Message], tools: Sequence[Tool] | None) -> str | None:
    shown = "".join(f"tool:{tool['function']['name']}\n" for tool in tools or ())
    return shown + "".join(f"{m['role']}: {m['content']}\n" for m in messages)


def encode(text: str, add_special_tokens: bool) -> array[int]:
    return token_ids([1] * add_special_tokens + list(text.encode()))


def chain(tokens: array[int], salt: str, adapter: str) -> int:
    digest = hashlib.sha256(f"{salt}/{adapter}/".encode() + tokens.tobytes())
    return int.from_bytes(digest.digest()[:8], "big")


def test_every_case_becomes_a_prompt_and_no_two_share_a_chain() -> None:
    made = golden_prompts(render, encode, chain)
    assert [prompt.name for prompt in made] == [case.name for case in GOLDEN_CASES]
    assert len({prompt.chain for prompt in made}) == len(made)
    by_name = {prompt.name: prompt for prompt in made}
    assert by_name["chat"].text == by_name["chat_salted"].text == by_name["chat_lora"].text
    assert by_name["completion"].tokens == 1 + len(by_name["completion"].text.encode())


def test_the_cases_cover_what_prompts_are_made_of() -> None:
    assert any(case.tools for case in GOLDEN_CASES)
    assert any(case.salt for case in GOLDEN_CASES)
    assert any(case.adapter for case in GOLDEN_CASES)
    assert any(not case.messages for case in GOLDEN_CASES)
    assert any(len(case.messages) > 4 and case.messages[0]["role"] == "system" for case in GOLDEN_CASES)


def test_without_a_template_only_completions_are_made() -> None:
    made = golden_prompts(lambda messages, tools: None, encode, chain)
    assert made
    assert all(prompt.name.startswith("completion") for prompt in made)


def test_a_template_that_takes_no_notice_of_tools_makes_no_prompt_with_tools() -> None:
    made = golden_prompts(lambda messages, tools: render(messages, None), encode, chain)
    names = {prompt.name for prompt in made}
    assert "chat" in names
    assert "chat_tools" not in names


def test_a_long_text_is_cut_between_characters_and_still_differs_by_its_chain() -> None:
    def long(end: str) -> tuple[GoldenPrompt, ...]:
        return golden_prompts(lambda messages, tools: "🙂" * 2000 + end, encode, chain)

    (one, *_), (other, *_) = long("a"), long("b")
    assert len(one.text.encode()) == MAX_TEXT_BYTES
    assert one.text == other.text == "🙂" * (MAX_TEXT_BYTES // 4)
    assert one.tokens == other.tokens == 8001
    assert "chain" in golden_conflicts([one], [other])[0]


def test_the_date_that_templates_are_given_is_always_the_same() -> None:
    assert golden_date("%d %b %Y") == "29 Feb 2024"


def test_equal_prompts_are_no_conflict_whatever_their_order() -> None:
    assert golden_conflicts(OURS, OURS) == []
    assert golden_conflicts(OURS[::-1], OURS) == []


def test_a_side_without_any_prompts_is_not_compared() -> None:
    assert golden_conflicts((), OURS) == []
    assert golden_conflicts(OURS, ()) == []


def test_another_text_is_shown_from_both_sides_at_the_first_character_that_differs() -> None:
    changed = replace(OURS[0], text=OURS[0].text.replace("how", "HOW"), tokens=10, chain=0xD4)
    assert golden_conflicts([changed, *OURS[1:]], OURS) == [
        "golden.chat: text from character 21 on: '<bos>user: hi there, HOW are you today? assis'… != "
        "'<bos>user: hi there, how are you today? assis'… (router), tokens: 10 != 9 (router), "
        "chain: 00000000000000d4 != 00000000000000a1 (router)"
    ]


def test_a_text_that_ends_early_is_a_difference_where_it_ends() -> None:
    shorter = replace(OURS[2], text="on", chain=1)
    (shown,) = golden_conflicts([*OURS[:2], shorter], OURS)
    assert "text from character 2 on: 'on' != 'once' (router)" in shown


def test_unreadable_characters_are_escaped() -> None:
    changed = replace(OURS[2], text="on\u200bce\x1b[2J", tokens=4)
    (shown,) = golden_conflicts([*OURS[:2], changed], OURS)
    assert r"'on\u200bce\x1b[2J' != 'once'" in shown


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        (
            replace(OURS[2], tokens=2, chain=9),
            "tokens: 2 != 1 (router), chain: 0000000000000009 != 00000000000000c3 (router), "
            "of equal text 'once'",
        ),
        (
            replace(OURS[2], chain=9),
            "chain: 0000000000000009 != 00000000000000c3 (router), of equal text 'once'",
        ),
    ],
)
def test_equal_text_with_other_tokens_or_another_chain_is_a_difference(
    changed: GoldenPrompt, says: str
) -> None:
    assert golden_conflicts([*OURS[:2], changed], OURS) == [f"golden.completion: {says}"]


def test_a_prompt_that_one_side_could_not_make_is_a_difference() -> None:
    assert golden_conflicts([OURS[0], OURS[2]], OURS) == [
        "golden.chat_tools: not made != 7 tokens '<bos>tools user: hi assi'… (router)"
    ]
    assert golden_conflicts(OURS, [OURS[0], OURS[2]]) == [
        "golden.chat_tools: 7 tokens '<bos>tools user: hi assi'… != not made (router)"
    ]


def test_many_differences_are_counted_and_not_all_shown() -> None:
    many = [GoldenPrompt(f"p{i}", "x", 1, i) for i in range(50)]
    found = golden_conflicts([replace(prompt, chain=99) for prompt in many], many)
    assert len(found) == 4
    assert found[-1] == "golden: 47 more of 50 prompts differ"


def identity(golden: tuple[GoldenPrompt, ...], **changed: object) -> WorkerIdentity:
    made = WorkerIdentity(
        worker_id="w",
        epoch=1,
        pool="both",
        role=Role.BOTH,
        model="m",
        revision="main",
        tokenizer_digest="t",
        max_model_len=100,
        kv=KvLayout(16, "bfloat16", "NHD", 1, 1, 1, 1),
        kv_blocks=10,
        engine="vllm",
        engine_version="1",
        golden=golden,
    )
    return replace(made, **changed)  # type: ignore[arg-type]


def test_registration_refuses_a_worker_whose_golden_prompts_differ() -> None:
    def conflicts(candidate: WorkerIdentity) -> list[str]:
        return registration_conflicts(candidate, model="m", tokenizer_digest="t", peers=(), golden=OURS)

    assert conflicts(identity(OURS)) == []
    assert conflicts(identity(())) == []
    (shown,) = conflicts(identity((replace(OURS[0], text="<bos>USER"), *OURS[1:])))
    assert shown.startswith("golden.chat: text from character 5 on: '<bos>USER' != '<bos>user: hi")
    # Under another model no chain can be equal, and that is what is said.
    assert conflicts(identity((replace(OURS[0], chain=5),), model="n")) == ["model: n != m (router)"]
