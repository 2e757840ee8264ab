// Sizes of pools: what the planner wants, what serves, and what is starting.

import { Band, Bar, Empty, Section, Spark, State } from "../parts/basics";
import { Table, type Column } from "../parts/table";
import { count } from "../lib/format";
import type { History } from "../lib/history";
import type { Pool, Status } from "../lib/types";

export function Scaling({ status, history }: { status: Status; history: History }) {
  const pools = status.pools ?? [];
  if (pools.length === 0)
    return (
      <Empty title="The router knows no sizes of pools.">
        Pools get their sizes from <code>replicas</code> in kvasir.yaml; with <code>scaling</code>, the planner sets them.
      </Empty>
    );
  return (
    <Section
      title="Pools"
      aside={
        <span class="quiet">
          forecast and recent actions: <code>kvasir explain scaling</code>
        </span>
      }
    >
      <Table rows={pools} columns={columns(history)} keyOf={(each) => each.pool} label="Pools" />
    </Section>
  );
}

function columns(history: History): Column<Pool>[] {
  return [
    { name: "pool", value: (each) => each.pool },
    { name: "model", value: (each) => each.model },
    { name: "role", value: (each) => each.role },
    { name: "desired", number: true, value: (each) => each.desired, show: (each) => count(each.desired) },
    { name: "serving", number: true, value: (each) => each.serving, show: (each) => count(each.serving) },
    { name: "starting", number: true, value: (each) => each.starting, show: (each) => count(each.starting) },
    {
      name: "serving of desired",
      value: share,
      show: (each) => <Bar value={share(each)} label={`${each.serving} of ${each.desired}`} tone={each.serving >= each.desired ? "good" : "warn"} />,
    },
    {
      name: "size, last minutes",
      value: (each) => each.serving,
      show: (each) => <Spark values={history.lines.get(`serving/${each.pool}`) ?? []} label={`Serving replicas of ${each.pool}`} />,
    },
    { name: "load", number: true, value: (each) => each.forecast?.load ?? null, show: (each) => busy(each.forecast?.load) },
    {
      name: "forecast",
      number: true,
      value: (each) => each.forecast?.expected ?? null,
      show: (each) => (each.forecast === null ? "–" : `${busy(each.forecast.expected)} to ${busy(each.forecast.upper)}`),
    },
    {
      name: "load, forecast and desired",
      value: (each) => each.forecast?.upper ?? null,
      show: (each) => each.forecast !== null && <Course pool={each.pool} history={history} />,
    },
    { name: "reason", value: (each) => reason(each)[0], show: (each) => <Why pool={each} /> },
  ];
}

/** Busy replicas. */
function busy(load: number | undefined): string {
  return load === undefined ? "–" : load.toFixed(2);
}

function Course({ pool, history }: { pool: string; history: History }) {
  const line = (name: string) => history.lines.get(`${name}/${pool}`) ?? [];
  return (
    <Band
      line={line("load")}
      dashed={line("desired")}
      low={line("expected")}
      high={line("upper")}
      label={`Load of ${pool}, its forecast with the margin, and desired replicas, in busy replicas`}
    />
  );
}

function share(pool: Pool): number {
  return pool.desired === 0 ? 1 : pool.serving / pool.desired;
}

function Why({ pool }: { pool: Pool }) {
  const [name, why] = reason(pool);
  return (
    <span class="why">
      <State name={name} tone={name === "steady" ? "good" : "warn"} /> <span class="reason">{why}</span>
    </span>
  );
}

function reason(pool: Pool): [string, string] {
  const { desired, serving, starting, forecast } = pool;
  const planned = (text: string): string => [text, ...(forecast?.because ?? [])].join("; ");
  if (serving < desired && starting > 0) return ["growing", planned(`${starting} of its replicas still start`)];
  if (serving < desired) return ["short", planned("replicas are missing and none is starting: see the verdict on the fleet")];
  if (serving > desired) return ["shrinking", planned("replicas beyond the desired size drain and leave")];
  return ["steady", planned("it has its desired size")];
}
