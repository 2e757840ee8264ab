"""The admission part of the deployment spec, and the router's rules derived from it."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from kvasir.config.spec.deployment import Deployment
from kvasir_router.admission import BrownoutStep
from kvasir_router.admission.from_spec import rules_of


def deployment(**admission: Any) -> Deployment:
    tenancy = {
        "priorities": ["gold", "silver", "iron"],
        "tenants": [{"name": "a", "weight": 3.0, "priority": "gold"}],
    }
    if "usual" in admission:
        tenancy["tenants"] = []
        del admission["usual"]
    return Deployment.model_validate({"tenancy": tenancy, "admission": admission})


def steps(*each: dict[str, Any]) -> dict[str, Any]:
    return {"steps": list(each)}


def test_rules_have_the_specs_names_and_numbers() -> None:
    spec = deployment(brownout=steps({"cap_max_tokens": 9}, {"shed": "silver"}), spare=0.1)
    rules = rules_of(spec)
    assert rules.brownout.steps == (BrownoutStep(cap_max_tokens=9), BrownoutStep(shed=1, shed_name="silver"))
    assert rules.spare == 0.1
    assert rules.weights["a"] == 3.0
    assert rules.seats == {"prefill": 64, "decode": 64}
    assert (rules.class_factor, rules.disaggregation) == (None, "always")


def test_weighted_classes_have_a_factor() -> None:
    assert rules_of(deployment(priorities="weighted", class_factor=3.0)).class_factor == 3.0


def test_a_tenant_alone_may_fill_the_queue_and_one_of_several_a_part_of_it() -> None:
    assert rules_of(deployment()).max_tenant_queue == 512
    assert rules_of(deployment(usual=True)).max_tenant_queue is None


@pytest.mark.parametrize(
    ("admission", "word"),
    [
        ({"brownout": steps({})}, "one of cap_max_tokens"),
        ({"brownout": steps({"cap_max_tokens": 1, "shed": "gold"})}, "one of cap_max_tokens"),
        ({"brownout": steps({"shed": "lead"})}, "shed names unknown 'lead'"),
        ({"brownout": steps({"fallback_model": "none"})}, "fallback_model names unknown 'none'"),
        ({"brownout": {"enter": 0.1, "leave": 0.1}}, "leave must be less than enter"),
        ({"long_share": 0}, "long_share"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_reason(admission: dict[str, Any], word: str) -> None:
    with pytest.raises(ValidationError, match=word):
        deployment(**admission)
