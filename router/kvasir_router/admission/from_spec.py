"""Reads the admission rules from a deployment spec."""

from __future__ import annotations

from kvasir.config.spec.admission import BrownoutStepSpec
from kvasir.config.spec.deployment import Deployment
from kvasir.config.spec.tenants import PRIORITY_SPAN
from kvasir_router.admission.contract import AdmissionRules, BrownoutRules, BrownoutStep


def rules_of(deployment: Deployment) -> AdmissionRules:
    """Return the rules for the model of a deployment view."""
    spec, routing, tenancy = deployment.admission, deployment.routing, deployment.tenancy
    several = len(tenancy.all_tenants()) > 1
    brownout = spec.brownout
    # A call for embeddings has many small inputs, so as many may wait as may be in flight.
    most = routing.max_in_flight if deployment.embeds else routing.max_queue
    return AdmissionRules(
        max_queue=most,
        max_queue_tokens=spec.max_queue_tokens,
        max_tenant_queue=max(1, int(spec.tenant_queue * most)) if several else None,
        headroom=spec.kv_headroom,
        spare=spec.spare,
        ahead_s=spec.prefill_ahead_s,
        ahead_shared_s=spec.shared_ahead_s,
        patience=spec.patience,
        itl_slack=spec.itl_slack,
        long_tokens=spec.long_prompt_tokens,
        long_share=spec.long_share,
        ageing_s=spec.ageing_s,
        class_span=PRIORITY_SPAN,
        class_factor=spec.class_factor if spec.priorities == "weighted" else None,
        weights=tenancy.weights(),
        seats={pool.name: pool.engine.max_num_seqs for pool in deployment.pools},
        step_tokens={pool.name: pool.engine.max_num_batched_tokens for pool in deployment.pools},
        disaggregation=deployment.disaggregation,
        brownout=BrownoutRules(
            # The fallback model has no fallback itself.
            steps=tuple(
                _step(each, tenancy.priorities)
                for each in brownout.steps
                if each.fallback_model != deployment.model.name
            ),
            enter=brownout.enter,
            leave=brownout.leave,
            enter_s=brownout.enter_s,
            leave_s=brownout.leave_s,
        ),
        spare_level=len(tenancy.priorities),
        spare_share=spec.spare_share,
    )


def _step(spec: BrownoutStepSpec, priorities: tuple[str, ...]) -> BrownoutStep:
    shed = None if spec.shed is None else priorities.index(spec.shed)
    return BrownoutStep(spec.cap_max_tokens, spec.fallback_model, shed, spec.shed or "")
