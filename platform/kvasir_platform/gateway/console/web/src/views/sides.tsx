// Who answers in the playground, and where an answer ran: on one side, or on two for a comparison.

import { useEffect, useState } from "preact/hooks";
import { getJson } from "../lib/api";
import type { Side } from "../lib/chat";
import type { Decision, Decisions, Status } from "../lib/types";

export const ANYONE: Side = { model: "", worker: "", policy: "" };

/** What tells sides apart, for the title of an answer. */
export function nameOf(side: Side): string {
  return [side.model, side.worker, side.policy].filter((each) => each !== "").join(" · ");
}

export function SideFields({ side, title, models, status, on }: { side: Side; title: string; models: readonly string[]; status: Status; on: (side: Side) => void }) {
  const serving = status.workers.filter((each) => each.model === side.model && each.state === "ready" && each.role !== "embed");
  const workers = serving.map((each) => each.worker_id).sort();
  return (
    <fieldset>
      <legend>{title}</legend>
      <Choice name="Model" value={side.model} values={models} on={(model) => on({ ...side, model, worker: "" })} />
      <Choice name="Worker" none="any" value={side.worker} values={workers} on={(worker) => on({ ...side, worker })} />
      <Choice name="Policy" none={status.policy ?? ""} value={side.policy} values={(status.policies ?? []).filter((each) => each !== status.policy)} on={(policy) => on({ ...side, policy })} />
    </fieldset>
  );
}

function Choice({ name, none, value, values, on }: { name: string; none?: string; value: string; values: readonly string[]; on: (value: string) => void }) {
  // A worker that has left stays chosen, so that nothing is sent to another one unnoticed.
  const gone = value !== "" && !values.includes(value);
  return (
    <label>
      {name}
      <select value={value} onChange={(event) => on(event.currentTarget.value)}>
        {none !== undefined && <option value="">{none}</option>}
        {gone && <option value={value}>{value} (gone)</option>}
        {values.map((each) => (
          <option key={each}>{each}</option>
        ))}
      </select>
    </label>
  );
}

/** Where an answer ran, read once when it has ended. Nothing without the right to read decisions. */
export function Ran({ id, side }: { id: string; side: Side | undefined }) {
  const [decision, setDecision] = useState<Decision | null>(null);
  useEffect(() => {
    const left = new AbortController();
    getJson<Decisions>(`decisions/${encodeURIComponent(id)}`, "operator", left.signal)
      .then((found) => setDecision(found.decisions[0] ?? null))
      .catch(() => setDecision(null));
    return () => left.abort();
  }, [id]);
  if (decision === null) return null;
  const at = [decision.prefill_worker, decision.decode_worker].filter((each) => each !== null);
  const missed = side !== undefined && side.worker !== "" && !at.includes(side.worker);
  return (
    <>
      <dt>ran on</dt>
      <dd class={missed ? "missed" : undefined}>
        {at.join(" → ")}
        {missed && `: ${side.worker} could not take it`}
      </dd>
      <dt>policy</dt>
      <dd>{decision.policy}</dd>
    </>
  );
}
