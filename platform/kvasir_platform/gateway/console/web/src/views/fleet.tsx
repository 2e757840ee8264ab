// Is all well, and if not, where: pools, workers and queues, second by second.

import { useState } from "preact/hooks";
import { Bar, Empty, Figure, FilterField, Prose, Section, State } from "../parts/basics";
import { Table, type Column } from "../parts/table";
import { count, percent, rate, seconds } from "../lib/format";
import { queuedIn, type History } from "../lib/history";
import type { Gpu, Queue, Status, Tier, Worker } from "../lib/types";

const MEDIA = ["device", "cpu", "disk", "remote"];

export function Fleet({ status, history }: { status: Status; history: History }) {
  const [asked, setAsked] = useState("");
  const [troubled, setTroubled] = useState(false);
  const workers = status.workers.filter((each) => matches(each, asked) && (!troubled || isTroubled(each)));
  return (
    <>
      <Verdict status={status} />
      <Now status={status} history={history} />
      <Queues status={status} />
      <Section
        title="Workers"
        aside={
          <span class="tools">
            <FilterField value={asked} finds="worker, pool, state, reason" on={setAsked} />
            <label>
              <input type="checkbox" checked={troubled} onChange={(event) => setTroubled(event.currentTarget.checked)} />{" "}
              only those with a problem
            </label>
          </span>
        }
      >
        {status.workers.length === 0 ? (
          <Empty title="The router knows no worker.">
            Workers appear here as soon as they register. <code>kvasir status</code> shows replicas that still start,
            and <code>kubectl get pods</code> those of a cluster.
          </Empty>
        ) : workers.length === 0 ? (
          <Empty title="No worker matches the filter." />
        ) : (
          <Table rows={workers} columns={columnsFor(status.workers)} keyOf={(each) => each.worker_id} label="Workers" />
        )}
      </Section>
    </>
  );
}

function Verdict({ status }: { status: Status }) {
  const problems = status.verdict?.problems ?? [];
  const well = status.verdict?.ok ?? status.ready;
  const sentence =
    status.verdict?.sentence ?? (status.ready ? "The deployment serves." : `Not ready: ${status.reason ?? "no reason given"}.`);
  const down = !well && (!status.ready || problems.some((each) => each.severity === "down"));
  return (
    <div class={`verdict ${well ? "good" : down ? "bad" : "warn"}`} role="status">
      <p>
        <Prose text={sentence} />
      </p>
      {problems.length > 0 && (
        <ul>
          {problems.map((each) => (
            <li key={`${each.code}${each.subject}`}>
              <State name={each.severity} tone={each.severity === "down" ? "bad" : "warn"} />
              <span>
                <Prose text={each.text} />{" "}
                <span class="quiet">
                  <Prose text={each.remedy} />
                </span>
              </span>
            </li>
          ))}
        </ul>
      )}
    </div>
  );
}

function Now({ status, history }: { status: Status; history: History }) {
  const ready = status.workers.filter((each) => each.state === "ready").length;
  const usage = status.workers.flatMap((each) => each.load?.kv_usage ?? []);
  const used = usage.length === 0 ? null : usage.reduce((sum, each) => sum + each, 0) / usage.length;
  const recent = status.recent ?? null;
  const over = recent === null ? "" : `in ${Math.round(recent.over_s)} s`;
  const measured = recent === null ? "requests are not kept" : `${recent.answered === 0 ? "none" : count(recent.answered)} ${over}`;
  return (
    <div class="figures">
      <Figure name="in flight" value={count(status.in_flight)} note="requests" line={history.lines.get("in_flight")} />
      <Figure name="queued" value={count(queuedIn(status))} note="requests" line={history.lines.get("queued")} />
      <Figure
        name="TTFT, median"
        value={seconds(recent?.ttft_s)}
        note={recent?.answered ? `p95 ${seconds(recent.ttft_p95_s)}, ${measured}` : measured}
        line={history.lines.get("ttft")}
      />
      <Figure
        name="ITL, median"
        value={seconds(recent?.itl_s)}
        note={recent?.answered ? `p95 ${seconds(recent.itl_p95_s)}` : measured}
        line={history.lines.get("itl")}
      />
      <Figure
        name="prefix hit rate"
        value={percent(recent?.hit_rate)}
        note={recent?.answered ? `of prompts, ${over}` : measured}
        line={history.lines.get("hit_rate")}
      />
      <Figure name="KV in use" value={percent(used)} note={`mean of ${count(usage.length)} workers`} />
      <Figure name="workers ready" value={`${ready} of ${status.workers.length}`} note={pools(status)} />
    </div>
  );
}

function pools(status: Status): string {
  const names = new Set(status.workers.map((each) => each.pool));
  return `${names.size} ${names.size === 1 ? "pool" : "pools"}`;
}

function Queues({ status }: { status: Status }) {
  const rows = Object.entries(status.queues ?? {}).map(([model, queue]) => ({ model, queue }));
  if (rows.length === 0) return null;
  const columns: Column<{ model: string; queue: Queue }>[] = [
    { name: "model", value: (row) => row.model },
    {
      name: "state",
      value: (row) => String(status.readiness[row.model]?.ready ?? false),
      show: ({ model }) => {
        const found = status.readiness[model];
        return found?.ready === false ? <State name={found.reason ?? "not ready"} tone="bad" /> : <State name="ready" />;
      },
    },
    { name: "queued", number: true, value: (row) => row.queue.queued, show: (row) => count(row.queue.queued) },
    {
      name: "parked",
      number: true,
      title: "requests that no worker can serve",
      value: (row) => row.queue.parked,
      show: (row) => count(row.queue.parked),
    },
    { name: "wait", number: true, value: (row) => row.queue.wait_s, show: (row) => seconds(row.queue.wait_s) },
    {
      name: "pressure",
      number: true,
      title: "expected wait, as a part of the promised TTFT",
      value: (row) => row.queue.pressure,
      show: (row) => percent(row.queue.pressure),
    },
    {
      name: "tokens/s",
      number: true,
      title: "prompt and expected output, measured while requests waited",
      value: (row) => row.queue.tokens_per_s,
      show: (row) => (row.queue.tokens_per_s === 0 ? "–" : rate(row.queue.tokens_per_s)),
    },
    {
      name: "KV reserved",
      value: (row) => row.queue.reserved_tokens,
      show: ({ queue }) => (
        <Bar
          value={queue.kv_tokens === 0 ? null : queue.reserved_tokens / queue.kv_tokens}
          label={`${count(queue.reserved_tokens)} of ${count(queue.kv_tokens)} tokens`}
        />
      ),
    },
    {
      name: "brown-out",
      value: (row) => row.queue.brownout?.text ?? "",
      show: (row) => row.queue.brownout?.text || <span class="quiet">none</span>,
    },
  ];
  return (
    <Section title="Models and queues">
      <Table rows={rows} columns={columns} keyOf={(row) => row.model} label="Models and queues" />
    </Section>
  );
}

const COLUMNS: Column<Worker>[] = [
  { name: "worker", value: (each) => each.worker_id, show: (each) => <span title={each.address}>{each.worker_id}</span> },
  { name: "pool", value: (each) => each.pool },
  {
    name: "role",
    value: (each) => each.assigned ?? each.role,
    show: (each) => (each.assigned === null ? (each.role ?? "–") : `${each.assigned} (lent)`),
  },
  { name: "state", value: (each) => each.state, show: (each) => <State name={each.state} /> },
  {
    name: "health",
    value: (each) => each.health.state,
    show: (each) => <State name={each.health.state} title={each.health.reason} />,
  },
  { name: "running", number: true, value: (each) => each.load?.running ?? null },
  { name: "waiting", number: true, value: (each) => each.load?.waiting ?? null },
  {
    name: "in flight",
    number: true,
    title: "requests of this router on the worker",
    value: (each) => each.in_flight,
  },
  { name: "KV used", value: (each) => each.load?.kv_usage ?? null, show: (each) => <Bar value={each.load?.kv_usage ?? null} /> },
  {
    name: "hit rate",
    number: true,
    title: "prefix tokens found, of those looked up, since the worker started",
    value: hitRate,
    show: (each) => percent(hitRate(each)),
  },
  {
    name: "index",
    title: "how well the router knows its cache",
    value: (each) => each.kv?.state ?? null,
    show: (each) => (each.kv === null ? "–" : <State name={each.kv.state} title={each.kv.reason} />),
  },
  {
    name: "blocks",
    number: true,
    title: "blocks in the index: reported, and predicted",
    value: (each) => each.kv?.blocks ?? null,
    show: (each) =>
      each.kv === null ? "–" : `${count(each.kv.blocks)}${each.kv.predicted_blocks > 0 ? ` + ${count(each.kv.predicted_blocks)}` : ""}`,
  },
  { name: "tiers", value: (each) => (each.load?.tiers ?? []).length, show: (each) => <Tiers tiers={each.load?.tiers ?? []} /> },
  { name: "reason", value: reasonOf, show: (each) => <span class="reason">{reasonOf(each)}</span> },
];

/** Shown where any worker has GPUs. */
const GPUS: Column<Worker>[] = [
  {
    name: "GPU",
    title: "multiprocessors that work; on GPUs that do not tell, the time in which a kernel ran",
    value: (each) => meanOf(each, (gpu) => gpu.sm_active ?? gpu.busy),
    show: (each) => <Bar value={meanOf(each, (gpu) => gpu.sm_active ?? gpu.busy)} />,
  },
  {
    name: "GPU memory",
    value: (each) => meanOf(each, (gpu) => gpu.memory_used / gpu.memory_total),
    show: (each) => <Bar value={meanOf(each, (gpu) => gpu.memory_used / gpu.memory_total)} />,
  },
];

function meanOf(worker: Worker, part: (gpu: Gpu) => number): number | null {
  const gpus = worker.load?.gpus ?? [];
  return gpus.length === 0 ? null : gpus.reduce((sum, gpu) => sum + part(gpu), 0) / gpus.length;
}

function columnsFor(workers: readonly Worker[]): readonly Column<Worker>[] {
  if (!workers.some((each) => (each.load?.gpus ?? []).length > 0)) return COLUMNS;
  const after = COLUMNS.findIndex((each) => each.name === "KV used") + 1;
  return [...COLUMNS.slice(0, after), ...GPUS, ...COLUMNS.slice(after)];
}

function Tiers({ tiers }: { tiers: readonly Tier[] }) {
  if (tiers.length === 0) return <span class="quiet">–</span>;
  return (
    <>
      {tiers.map((tier) => {
        const name = MEDIA[tier.medium] ?? "tier";
        const full = tier.bytes_capacity ? ` ${percent((tier.bytes_used ?? 0) / tier.bytes_capacity)}` : "";
        return tier.trouble ? (
          <State key={name} name={`${name}${full}`} tone="bad" title={tier.trouble} />
        ) : (
          <span key={name} class="tier">{`${name}${full}`}</span>
        );
      })}
    </>
  );
}

function hitRate(worker: Worker): number | null {
  const { load } = worker;
  return load === null || load.prefix_queries_tokens === 0 ? null : load.prefix_hits_tokens / load.prefix_queries_tokens;
}

function reasonOf(worker: Worker): string {
  const troubles = (worker.load?.tiers ?? []).flatMap((tier) => tier.trouble ?? []);
  const index = worker.kv !== null && worker.kv.state !== "exact" ? worker.kv.reason : "";
  return [worker.reason, worker.health.reason, index, ...troubles].filter((each) => each !== "").join("; ");
}

function isTroubled(worker: Worker): boolean {
  return worker.state !== "ready" || worker.health.state !== "healthy" || reasonOf(worker) !== "";
}

function matches(worker: Worker, asked: string): boolean {
  const text = [worker.worker_id, worker.pool, worker.model, worker.role, worker.state, worker.health.state, reasonOf(worker)];
  return text.join(" ").toLowerCase().includes(asked.trim().toLowerCase());
}
