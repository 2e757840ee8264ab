// What tenants cost, what is left of their budgets, and how much time of workers nobody used.

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

export function Costs() {
  const { data, error } = useFeed<CostPage>("console/costs", undefined, undefined, 10_000);
  if (data === null) return <Section title="Costs">{error === null ? <Empty title="Reading the costs …" /> : <Empty title="The costs cannot be read.">{error.message}</Empty>}</Section>;
  if (!data.counted)
    return (
      <Section title="Costs">
        <Empty title="Costs are not counted.">
          Set <code>cost.enabled</code> to true in kvasir.yaml, and restart the routers.
        </Empty>
      </Section>
    );
  const money = (value: number): string => `${amount(value)} ${data.currency}`;
  const part = (kind: string): number => data.lines.filter((each) => each.kind === kind).reduce((sum, each) => sum + each.seconds, 0);
  const share = (kind: string): string => percent(data.device_seconds === 0 ? null : part(kind) / data.device_seconds);
  const since = new Date(data.since * 1000).toISOString().slice(0, 10);
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
            since {since} (UTC), charged when requests end; <code>kvasir cost</code> shows keys, models and other times
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
        <Table rows={byTenant(data.lines)} columns={tenantColumns(money, data.cost)} keyOf={(each) => each.names["tenant"] ?? ""} label="Costs by tenant" sorted="cost" />
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

function byTenant(lines: readonly CostLine[]): CostLine[] {
  const found = new Map<string, CostLine>();
  for (const line of lines) {
    if (line.kind !== "usage") continue;
    const tenant = line.names["tenant"] ?? "";
    const known = found.get(tenant);
    if (known === undefined) found.set(tenant, { ...line });
    else for (const name of SUMMED) known[name] += line[name];
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

function tenantColumns(money: Money, total: number): Column<CostLine>[] {
  const time = (name: string, read: (each: CostLine) => number, title: string): Column<CostLine> => ({
    name,
    number: true,
    title,
    value: read,
    show: (each) => seconds(read(each)),
  });
  return [
    { name: "tenant", value: (each) => each.names["tenant"] ?? "" },
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
