// What tenants, keys, models, SLO classes and pools cost, what is left of budgets, and how much time of workers nobody used.

import { useState } from "preact/hooks";
import { Bar, Empty, Figure, Section } from "../parts/basics";
import { Table, type Column } from "../parts/table";
import { count, percent, seconds } from "../lib/format";
import { useFeed } from "../lib/feed";
import type { Budget, CostLine, CostPage } from "../lib/types";

interface Day {
  day: string;
  usage: number;
  wasted: number;
  idle: number;
}

const GROUPS: Record<string, string> = { tenant: "tenant", key: "API key", model: "model", slo: "SLO class", pool: "pool" };
const PERIODS: Record<string, string> = { "1": "last 24 hours", "7": "last 7 days", "30": "last 30 days", "90": "last 90 days" };
const WEEK = 7;

export function Costs() {
  const [by, setBy] = useState("tenant");
  const [days, setDays] = useState("7");
  // Longer periods take the router more time to read, and change little.
  const interval_ms = Number(days) > WEEK ? 60_000 : 10_000;
  const { data, error } = useFeed<CostPage>(`console/costs?by=${by}&days=${days}`, undefined, undefined, interval_ms);
  if (data?.counted === false)
    return (
      <Section title="Costs">
        <Empty title="Costs are not counted.">
          Set <code>cost.enabled</code> to true in kvasir.yaml, and restart the routers.
        </Empty>
      </Section>
    );
  return (
    <>
      <div class="tools bare">
        <Choice label="Costs by" name="by" options={GROUPS} value={by} on={setBy} />
        <Choice label="Period" name="days" options={PERIODS} value={days} on={setDays} />
      </div>
      {data === null ? (
        <Section title="Costs">{error === null ? <Empty title="Reading the costs …" /> : <Empty title="The costs cannot be read.">{error.message}</Empty>}</Section>
      ) : (
        <Statement data={data} />
      )}
    </>
  );
}

function Choice({ label, name, options, value, on }: { label: string; name: string; options: Record<string, string>; value: string; on: (value: string) => void }) {
  return (
    <label>
      {label}{" "}
      <select name={name} value={value} onChange={(event) => on(event.currentTarget.value)}>
        {Object.entries(options).map(([each, text]) => (
          <option key={each} value={each}>
            {text}
          </option>
        ))}
      </select>
    </label>
  );
}

function Statement({ data }: { data: CostPage }) {
  const by = data.by.find((each) => each !== "day") ?? "tenant";
  const group = GROUPS[by] ?? by;
  const money = (value: number): string => `${amount(value)} ${data.currency}`;
  const part = (kind: string): number => data.lines.filter((each) => each.kind === kind).reduce((sum, each) => sum + each.seconds, 0);
  const share = (kind: string): string => percent(data.device_seconds === 0 ? null : part(kind) / data.device_seconds);
  const since = new Date(data.since * 1000).toISOString().slice(0, 16).replace("T", " ");
  return (
    <>
      <div class="figures">
        <Figure name="cost of all workers" value={money(data.cost)} note={seconds(data.device_seconds)} />
        <Figure name="used" value={share("usage")} note={seconds(part("usage"))} />
        <Figure name="wasted" value={share("wasted")} note={seconds(part("wasted"))} />
        <Figure name="idle" value={share("idle")} note={seconds(part("idle"))} />
      </div>
      <Section
        title="Costs"
        aside={
          <span class="quiet">
            since {since} (UTC), charged when requests end; <code>kvasir cost</code> combines groups, and shows other times
          </span>
        }
      >
        {!data.stored && (
          <p class="error" role="alert">
            The last write of costs failed: see the router's log. They are kept and written later.
          </p>
        )}
        {data.unpriced.length > 0 && (
          <p class="error" role="alert">
            No price is known for the GPUs of {data.unpriced.join(", ")}: name them in <code>cost.prices</code>.
          </p>
        )}
        <Table key={by} rows={byGroup(data.lines, by)} columns={groupColumns(by, group, money, data.cost)} keyOf={(each) => each.names[by] ?? ""} label={`Costs by ${group}`} sorted="cost" />
      </Section>
      {data.budgets.length > 0 && (
        <Section title="Budgets">
          <Table rows={data.budgets} columns={budgetColumns(money)} keyOf={(each) => each.tenant} label="Budgets of tenants" />
        </Section>
      )}
      <Section title="Costs by day">
        <Table rows={byDay(data.lines)} columns={dayColumns(money)} keyOf={(each) => each.day} label="Costs by day and kind" />
      </Section>
    </>
  );
}

function amount(value: number): string {
  if (value === 0 || value >= 10) return value.toFixed(2);
  return value >= 0.01 ? value.toFixed(4) : value.toPrecision(2);
}

const SUMMED = ["requests", "prompt_tokens", "cached_tokens", "output_tokens", "prefill_s", "decode_s", "kv_s", "transfer_s", "seconds", "cost"] as const;

function byGroup(lines: readonly CostLine[], by: string): CostLine[] {
  const found = new Map<string, CostLine>();
  for (const line of lines) {
    if (line.kind !== "usage") continue;
    const name = line.names[by] ?? "";
    const known = found.get(name);
    if (known === undefined) found.set(name, { ...line });
    else for (const each of SUMMED) known[each] += line[each];
  }
  return [...found.values()];
}

function byDay(lines: readonly CostLine[]): Day[] {
  const found = new Map<string, Day>();
  for (const line of lines) {
    const day = line.names["day"] ?? "";
    const known = found.get(day) ?? { day, usage: 0, wasted: 0, idle: 0 };
    found.set(day, known);
    known[line.kind] += line.cost;
  }
  return [...found.values()].sort((a, b) => b.day.localeCompare(a.day));
}

type Money = (value: number) => string;

function groupColumns(by: string, group: string, money: Money, total: number): Column<CostLine>[] {
  const time = (name: string, read: (each: CostLine) => number, title: string): Column<CostLine> => ({
    name,
    number: true,
    title,
    value: read,
    show: (each) => seconds(read(each)),
  });
  return [
    { name: group, value: (each) => each.names[by] || "none" },
    { name: "requests", number: true, value: (each) => each.requests, show: (each) => count(each.requests) },
    {
      name: "cached",
      number: true,
      title: "share of prompt tokens that were not computed again",
      value: (each) => (each.prompt_tokens === 0 ? null : each.cached_tokens / each.prompt_tokens),
      show: (each) => percent(each.prompt_tokens === 0 ? null : each.cached_tokens / each.prompt_tokens),
    },
    time("prefill", (each) => each.prefill_s, "computing prompts"),
    time("decode", (each) => each.decode_s, "its share of steps"),
    time("KV", (each) => each.kv_s, "memory that was held"),
    time("transfer", (each) => each.transfer_s, "memory that was held while KV moved"),
    time("sum", (each) => each.seconds, "of a GPU, or of a worker without"),
    {
      name: "cost",
      number: true,
      value: (each) => each.cost,
      show: (each) => <Bar value={total === 0 ? null : each.cost / total} label={money(each.cost)} tone="good" />,
    },
  ];
}

function budgetColumns(money: Money): Column<Budget>[] {
  const bound = (each: Budget): number => each.hard ?? each.soft ?? 0;
  return [
    { name: "tenant", value: (each) => each.tenant },
    { name: "period", value: (each) => each.period },
    {
      name: "spent",
      value: (each) => each.spent / bound(each),
      show: (each) => <Bar value={each.spent / bound(each)} label={`${money(each.spent)} of ${money(bound(each))}`} />,
    },
    { name: "soft", number: true, value: (each) => each.soft, show: (each) => (each.soft === null ? "–" : money(each.soft)) },
    { name: "hard", number: true, value: (each) => each.hard, show: (each) => (each.hard === null ? "–" : money(each.hard)) },
    { name: "renewed", value: (each) => each.renews, show: (each) => new Date(each.renews * 1000).toISOString().slice(0, 10) },
  ];
}

function dayColumns(money: Money): Column<Day>[] {
  const cost = (name: "usage" | "wasted" | "idle", text: string): Column<Day> => ({
    name: text,
    number: true,
    value: (each) => each[name],
    show: (each) => money(each[name]),
  });
  return [{ name: "day", value: (each) => each.day }, cost("usage", "used"), cost("wasted", "wasted"), cost("idle", "idle")];
}
