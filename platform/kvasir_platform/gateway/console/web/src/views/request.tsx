// One call: where its time went, what it claims of its workers, and why it ran where it ran.

import { Empty, Section, State } from "../parts/basics";
import { Table, type Column } from "../parts/table";
import { Waterfall } from "../parts/waterfall";
import { count, seconds } from "../lib/format";
import { useFeed } from "../lib/feed";
import type { Claim, Decision, Decisions, Place, Timeline } from "../lib/types";

const VERBS: Record<string, string> = { prefill: "Prefill", decode: "Decode", whole: "Whole request" };

export function RequestPage({ id }: { id: string }) {
  const { data, error } = useFeed<Decisions>(`decisions/${encodeURIComponent(id)}`, undefined, isOver);
  const timelines = new Map((data?.timelines ?? []).map((each) => [each.request_id, each]));
  const decisions = new Map((data?.decisions ?? []).map((each) => [each.request_id, each]));
  const names = new Set([...decisions.keys(), ...timelines.keys()]);
  return (
    <>
      <p>
        <a href="#/requests">← all requests</a>
      </p>
      {data === null && error === null && <Empty title="Reading the decision …" />}
      {data === null && error !== null && <Empty title={`Nothing is known of ${id}.`}>{error.message}</Empty>}
      {[...names].map((each) => (
        <One key={each} id={each} decision={decisions.get(each)} timeline={timelines.get(each)} />
      ))}
    </>
  );
}

function isOver(found: Decisions): boolean {
  const over = (each: { outcome: string | null }): boolean => each.outcome !== null;
  return found.decisions.every(over) && (found.timelines ?? []).every(over);
}

function One({ id, decision, timeline }: { id: string; decision: Decision | undefined; timeline: Timeline | undefined }) {
  const outcome = timeline?.outcome ?? decision?.outcome ?? null;
  return (
    <>
      <Section title={id} aside={<State name={outcome ?? timeline?.running ?? "in flight"} tone={outcome === "ok" ? "good" : outcome === null ? "warn" : "bad"} />}>
        <p>{decision === undefined ? "It waits in the router's queue: no worker was chosen yet." : sentence(decision)}</p>
        {timeline !== undefined && <p class="quiet">{facts(timeline)}</p>}
        {timeline !== undefined && <Waterfall spans={timeline.phases} total_s={timeline.total_s} />}
        {decision !== undefined && <Outcome decision={decision} />}
      </Section>
      {(timeline?.claims ?? []).length > 0 && (
        <Section title="Claims">
          <p class="quiet">
            Claims are proportions, and not what is charged: in each hour, the busy time of a pool is divided in proportion to the claims of its requests (docs/COST.md).
          </p>
          <Table rows={timeline?.claims ?? []} columns={claimColumns} keyOf={(each) => each.worker_id} label="Claims on workers" />
        </Section>
      )}
      {decision?.parts.map((part) => (
        <Section
          key={part.part}
          title={`${VERBS[part.part] ?? part.part}: ${part.places.length} considered`}
          aside={
            <span class="quiet">
              {part.unit === "s" ? "terms in milliseconds, smaller is better" : part.unit === "" ? "the policy has no cost terms" : `terms in ${part.unit}`}
              {decision.omitted > 0 && `; ${count(decision.omitted)} more places are left out`}
            </span>
          }
        >
          <Table rows={part.places} columns={columns(part.places, part.unit)} keyOf={name} label={`Candidates: ${part.part}`} />
        </Section>
      ))}
    </>
  );
}

function facts(timeline: Timeline): string {
  const { tenant, model, prompt_tokens, cached_tokens, output_tokens, transferred_bytes, retries, migrations, total_s } = timeline;
  const moved = transferred_bytes > 0 ? `, ${(transferred_bytes / 2 ** 20).toFixed(1)} MiB of KV moved` : "";
  const tries = retries + migrations > 0 ? `, ${retries} retries, ${migrations} failovers` : "";
  return `${tenant}, ${model}: ${count(prompt_tokens)} prompt tokens, ${count(cached_tokens)} of them cached, ${count(output_tokens)} output tokens in ${seconds(total_s)}${moved}${tries}`;
}

function sentence(decision: Decision): string {
  const where = decision.prefill_worker === null ? `Runs on ${decision.decode_worker}` : `Prefill on ${decision.prefill_worker}, decode on ${decision.decode_worker}`;
  const after = decision.queued_s > 0 ? `, ${seconds(decision.queued_s)} after it arrived` : "";
  const again = decision.attempt > 1 ? `, at attempt ${decision.attempt}` : "";
  return `${where}: policy ${decision.policy}, ${decision.reason}, decided in ${seconds(decision.decided_in_s)}${after}${again}.`;
}

function Outcome({ decision }: { decision: Decision }) {
  const predicted = decision.predicted_ttft_s > 0 ? decision.queued_s + decision.predicted_ttft_s : null;
  const rows: [string, string, string, string][] = [
    ["cached tokens", count(decision.predicted_cached_tokens), count(decision.actual_cached_tokens), `of ${count(decision.prompt_tokens)} in the prompt`],
    ["TTFT", seconds(predicted), seconds(decision.actual_ttft_s), `${seconds(decision.slo_ttft_s)} promised`],
    ["mean ITL", "–", seconds(decision.actual_itl_s), `${seconds(decision.slo_itl_s)} promised`],
  ];
  return (
    <div class="pair">
      <table class="small">
        <caption class="hidden">Predicted and actual</caption>
        <thead>
          <tr>
            <th scope="col" />
            <th scope="col" class="number">
              predicted
            </th>
            <th scope="col" class="number">
              actual
            </th>
            <th scope="col" />
          </tr>
        </thead>
        <tbody>
          {rows.map(([title, before, after, note]) => (
            <tr key={title}>
              <th scope="row">{title}</th>
              <td class="number">{before}</td>
              <td class="number">{after}</td>
              <td class="quiet">{note}</td>
            </tr>
          ))}
        </tbody>
      </table>
      <dl>
        <dt>SLO {decision.slo}</dt>
        <dd>{decision.slo_met === null ? (decision.outcome === null ? "still open" : "not judged") : decision.slo_met ? "met" : "missed"}</dd>
        <dt>Regret</dt>
        <dd>{regret(decision)}</dd>
        {decision.rates !== "" && (
          <>
            <dt>Costs began with</dt>
            <dd>{decision.rates}</dd>
          </>
        )}
      </dl>
    </div>
  );
}

function phase(name: string, value: (each: Claim) => number, title: string): Column<Claim> {
  return { name, number: true, title, value, show: (each) => seconds(value(each)) };
}

const claimColumns: Column<Claim>[] = [
  { name: "worker", value: (each) => each.worker_id },
  { name: "pool", value: (each) => each.pool },
  phase("prefill", (each) => each.prefill_s, "computing the prompt"),
  phase("decode", (each) => each.decode_s, "its share of steps"),
  phase("KV", (each) => each.kv_s, "memory that was held"),
  phase("transfer", (each) => each.transfer_s, "memory that was held while KV moved"),
  phase("wasted", (each) => each.wasted_s, "work that nobody is charged for"),
];

function regret(decision: Decision): string {
  if (decision.regret_s === null) return "not judged";
  if (decision.regret_s === 0) return "none: with what is known afterwards, no other place would have cost less";
  const causes = Object.entries(decision.regret_causes).sort(([, a], [, b]) => b - a);
  const parts = causes.map(([cause, part]) => `${cause} ${seconds(part)}`).join(", ");
  return `${seconds(decision.regret_s)} of cost (${parts}); ${decision.better.join(" and ")} would have cost less`;
}

function name(place: Place): string {
  return place.rank > 0 ? `${place.worker_id}/${place.rank}` : place.worker_id;
}

function columns(places: readonly Place[], unit: string): Column<Place>[] {
  const facts: [string, string[]][] = [
    ["cached", ["cached_tokens"]],
    ["in tiers", ["cpu_tokens", "disk_tokens", "remote_tokens"]],
    ["queued", ["queued_prefill_tokens"]],
    ["streams", ["streams"]],
  ];
  const sum = (place: Place, keys: string[]): number => keys.reduce((total, key) => total + (place.facts[key] ?? 0), 0);
  const best = Math.max(...places.map((each) => Math.abs(each.total ?? 0)), 1e-12);
  const terms = Object.keys(places[0]?.terms ?? {}).filter((term) => places.some((each) => each.terms[term] !== 0));
  return [
    {
      name: "worker",
      value: name,
      show: (each) => (each.chosen ? <strong title="chosen">{`✓ ${name(each)}`}</strong> : <span class="indent">{name(each)}</span>),
    },
    { name: "KV", value: (each) => each.kv_state, show: (each) => <State name={each.kv_state} /> },
    ...(places.some((each) => each.link !== "") ? [{ name: "link", value: (each: Place) => each.link }] : []),
    ...facts
      .filter(([, keys]) => places.some((each) => sum(each, keys) > 0))
      .map(([title, keys]): Column<Place> => ({ name: title, number: true, value: (each) => sum(each, keys), show: (each) => count(sum(each, keys)) })),
    ...terms.map(
      (term): Column<Place> => ({
        name: term.replace(/_s$/, ""),
        number: true,
        value: (each) => each.terms[term] ?? null,
        show: (each) => amount(each.terms[term], unit),
      }),
    ),
    ...(terms.length === 0
      ? []
      : [
          {
            name: "total",
            number: true,
            value: (each: Place) => each.total,
            show: (each: Place) => (
              <span class={each.chosen ? "total chosen" : "total"}>
                <span class="track" aria-hidden="true">
                  <span class="fill plain" style={{ width: `${(Math.abs(each.total ?? best) / best) * 100}%` }} />
                </span>
                {amount(each.total, unit)}
              </span>
            ),
          },
        ]),
  ];
}

/** JSON has no infinity: it arrives as null. */
function amount(value: number | null | undefined, unit: string): string {
  if (value === null || value === undefined) return "∞";
  return unit === "s" ? (value * 1e3).toLocaleString("en", { minimumFractionDigits: 2, maximumFractionDigits: 2 }) : String(Number(value.toPrecision(4)));
}
