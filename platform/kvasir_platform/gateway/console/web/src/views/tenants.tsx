// Who uses the deployment, who is refused, and what it costs.

import { Empty, Section } from "../parts/basics";
import { Table, type Column } from "../parts/table";
import { count, percent } from "../lib/format";
import { useText } from "../lib/feed";
import { tenantsOf, type Tenant } from "../lib/tenants";
import { Costs } from "./costs";

export function Tenants() {
  return (
    <>
      <Usage />
      <Costs />
    </>
  );
}

function Usage() {
  const { data, error } = useText("console/metrics");
  if (data === null) return error === null ? <Empty title="Reading the metrics …" /> : <Empty title="The metrics cannot be read.">{error.message}</Empty>;
  const tenants = tenantsOf(data);
  if (tenants.length === 0)
    return (
      <Empty title="No tenant has sent a request.">
        Tenants stand in <code>tenancy</code> of kvasir.yaml; without them all requests are the tenant <code>default</code>'s.
      </Empty>
    );
  const tokens = tenants.reduce((sum, each) => sum + each.prompt_tokens + each.output_tokens, 0);
  const columns: Column<Tenant>[] = [
    { name: "tenant", value: (each) => each.tenant },
    { name: "requests", number: true, value: (each) => each.requests, show: (each) => count(each.requests) },
    { name: "running", number: true, value: (each) => each.running, show: (each) => count(each.running) },
    { name: "prompt tokens", number: true, value: (each) => each.prompt_tokens, show: (each) => count(each.prompt_tokens) },
    { name: "output tokens", number: true, value: (each) => each.output_tokens, show: (each) => count(each.output_tokens) },
    {
      name: "share of tokens",
      number: true,
      value: (each) => each.prompt_tokens + each.output_tokens,
      show: (each) => percent(tokens === 0 ? null : (each.prompt_tokens + each.output_tokens) / tokens),
    },
    { name: "refused", number: true, value: refused, show: (each) => count(refused(each)) },
    {
      name: "by code",
      value: refused,
      show: (each) => (
        <span class="reason">
          {Object.entries(each.refused)
            .sort(([, a], [, b]) => b - a)
            .map(([code, times]) => `${code} ${count(times)}`)
            .join(", ")}
        </span>
      ),
    },
  ];
  return (
    <Section title="Tenants" aside={<span class="quiet">counted since the gateway started</span>}>
      <Table rows={tenants} columns={columns} keyOf={(each) => each.tenant} label="Tenants" sorted="share of tokens" />
    </Section>
  );
}

function refused(tenant: Tenant): number {
  return Object.values(tenant.refused).reduce((sum, each) => sum + each, 0);
}
