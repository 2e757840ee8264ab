// Requests that run and that ended: which are slow, and in which phase.

import { useState } from "preact/hooks";
import { Empty, FilterField, Section, State } from "../parts/basics";
import { Table, type Column } from "../parts/table";
import { MiniWaterfall } from "../parts/waterfall";
import { count, percent, seconds } from "../lib/format";
import type { Seen } from "../lib/feed";
import type { Ended, Requests, Running } from "../lib/types";

export function RequestList({ seen }: { seen: Seen<Requests> }) {
  const [asked, setAsked] = useState("");
  const [order, setOrder] = useState<"latest" | "slowest">("latest");
  const { data, error } = seen;
  if (data === null) {
    if (error === null) return <Empty title="Reading the requests …" />;
    return <Empty title="The gateway does not list its requests.">{error.message}</Empty>;
  }
  const running = data.running.filter((each) => matches(each, asked));
  const ended = data[order].filter((each) => matches(each, asked));
  return (
    <>
      <form
        class="tools bare"
        role="search"
        onSubmit={(event) => {
          event.preventDefault();
          const id = new FormData(event.currentTarget).get("id");
          if (typeof id === "string" && id.trim() !== "") location.hash = `#/requests/${encodeURIComponent(id.trim())}`;
        }}
      >
        <FilterField value={asked} finds="tenant, model, worker, outcome" on={setAsked} />
        <label>
          Explain <input name="id" placeholder="x-request-id of an answer" size={34} />
        </label>
        <button type="submit">Show</button>
        <Legend />
      </form>
      <Section
        title="Running"
        aside={<span class="quiet">{`${count(data.in_flight)} in flight, ${count(data.queued)} queued; the longest running first`}</span>}
      >
        {running.length === 0 ? (
          <Empty title={data.running.length === 0 ? "No request runs." : "No running request matches the filter."}>
            {data.running.length === 0 && "Send one from the playground, or with any OpenAI client."}
          </Empty>
        ) : (
          <Table rows={running} columns={runningColumns(longest(running.map((each) => each.age_s)))} keyOf={(each) => each.request_id} label="Running requests" />
        )}
      </Section>
      <Section
        title="Ended"
        aside={
          <span class="tools" role="radiogroup" aria-label="Order of the requests that ended">
            {(["latest", "slowest"] as const).map((each) => (
              <label key={each}>
                <input type="radio" name="order" checked={order === each} onChange={() => setOrder(each)} /> {each}
              </label>
            ))}
          </span>
        }
      >
        {ended.length === 0 ? (
          <Empty title={data[order].length === 0 ? "No request has ended yet." : "No request that ended matches the filter."}>
            {data[order].length === 0 && (
              <>
                Kept are as many as <code>routing.decision_records</code> says.
              </>
            )}
          </Empty>
        ) : (
          <Table key={order} rows={ended} columns={endedColumns(longest(ended.map((each) => each.e2e_s)))} keyOf={(each) => each.request_id} label="Requests that ended" />
        )}
      </Section>
    </>
  );
}

function Legend() {
  return (
    <span class="legend" aria-hidden="true">
      <span class="span queue" /> queue <span class="span prefill" /> to the first token <span class="span stream" /> stream
    </span>
  );
}

export function requestLink(id: string): string {
  return `#/requests/${encodeURIComponent(id)}`;
}

function longest(values: readonly number[]): number {
  return Math.max(...values, 1e-3);
}

function matches(request: Running | Ended, asked: string): boolean {
  const { request_id, model, tenant, slo, prefill_worker, decode_worker } = request;
  const state = "outcome" in request ? request.outcome : request.phase;
  const text = [request_id, model, tenant, slo, prefill_worker, decode_worker, state].join(" ");
  return text.toLowerCase().includes(asked.trim().toLowerCase());
}

interface Common {
  request_id: string;
  model: string;
  tenant: string;
  slo: string;
  prompt_tokens: number;
  output_tokens: number;
  prefill_worker: string | null;
  decode_worker: string | null;
  retries: number;
  migrations: number;
}

function named<Row extends Common>(): Column<Row>[] {
  return [
    {
      name: "request",
      value: (each) => each.request_id,
      show: (each) => (
        <a class="id" title={each.request_id} href={requestLink(each.request_id)}>
          {each.request_id}
        </a>
      ),
    },
    { name: "tenant", value: (each) => each.tenant },
    { name: "model", value: (each) => each.model },
  ];
}

function where<Row extends Common>(): Column<Row>[] {
  return [
    {
      name: "workers",
      value: (each) => each.decode_worker,
      show: ({ prefill_worker, decode_worker }) =>
        prefill_worker === null || prefill_worker === decode_worker ? (decode_worker ?? "–") : `${prefill_worker} → ${decode_worker ?? "–"}`,
    },
    {
      name: "tries",
      number: true,
      title: "starts after a failure, and failovers after the loss of a worker",
      value: (each) => each.retries + each.migrations,
      show: ({ retries, migrations }) => (retries + migrations === 0 ? <span class="quiet">–</span> : `${retries} + ${migrations}`),
    },
  ];
}

function runningColumns(scale_s: number): Column<Running>[] {
  return [
    ...named<Running>(),
    { name: "phase", value: (each) => each.phase, show: (each) => <State name={each.phase} tone={each.phase === "queued" ? "warn" : "good"} /> },
    { name: "age", number: true, value: (each) => each.age_s, show: (each) => seconds(each.age_s) },
    {
      name: "time",
      title: "queue, to the first token, stream",
      value: (each) => each.age_s,
      show: (each) => <MiniWaterfall queued_s={each.queued_s} ttft_s={each.ttft_s} end_s={each.age_s} scale_s={scale_s} />,
    },
    { name: "TTFT", number: true, value: (each) => each.ttft_s, show: (each) => seconds(each.ttft_s) },
    { name: "prompt", number: true, title: "tokens", value: (each) => each.prompt_tokens, show: (each) => count(each.prompt_tokens) },
    { name: "output", number: true, title: "tokens so far", value: (each) => each.output_tokens, show: (each) => count(each.output_tokens) },
    ...where<Running>(),
  ];
}

function endedColumns(scale_s: number): Column<Ended>[] {
  return [
    ...named<Ended>(),
    { name: "outcome", value: (each) => each.outcome, show: (each) => <State name={each.outcome} tone={each.outcome === "ok" ? "good" : each.outcome === "client_closed" ? "quiet" : "bad"} /> },
    { name: "SLO", value: (each) => each.slo, show: (each) => <State name={each.slo} tone={each.slo_met === null ? "quiet" : each.slo_met ? "good" : "bad"} title={each.slo_met === null ? "not judged" : each.slo_met ? "met" : "missed"} /> },
    { name: "ended", number: true, value: (each) => -each.ended_s_ago, show: (each) => `${seconds(each.ended_s_ago)} ago` },
    { name: "took", number: true, value: (each) => each.e2e_s, show: (each) => seconds(each.e2e_s) },
    {
      name: "time",
      title: "queue, to the first token, stream",
      value: (each) => each.e2e_s,
      show: (each) => <MiniWaterfall queued_s={each.queued_s} ttft_s={each.ttft_s} end_s={each.e2e_s} scale_s={scale_s} />,
    },
    { name: "TTFT", number: true, value: (each) => each.ttft_s, show: (each) => seconds(each.ttft_s) },
    { name: "ITL", number: true, value: (each) => each.itl_s, show: (each) => seconds(each.itl_s) },
    { name: "prompt", number: true, title: "tokens", value: (each) => each.prompt_tokens, show: (each) => count(each.prompt_tokens) },
    {
      name: "cached",
      number: true,
      title: "of the prompt",
      value: (each) => each.cached_tokens / Math.max(1, each.prompt_tokens),
      show: (each) => percent(each.cached_tokens / Math.max(1, each.prompt_tokens)),
    },
    { name: "output", number: true, title: "tokens", value: (each) => each.output_tokens, show: (each) => count(each.output_tokens) },
    ...where<Ended>(),
  ];
}
