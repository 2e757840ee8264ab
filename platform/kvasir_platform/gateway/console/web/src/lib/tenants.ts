// Tenants' counters, from the series kvasir_tenant_* of the gateway's metrics.

export interface Tenant {
  tenant: string;
  requests: number;
  prompt_tokens: number;
  output_tokens: number;
  running: number;
  refused: Record<string, number>;
}

const SERIES = /^kvasir_tenant_(\w+?)(?:_total)?\{(.*)\} (\S+)$/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

/** Read a page in Prometheus' text format. */
export function tenantsOf(page: string): Tenant[] {
  const found = new Map<string, Tenant>();
  for (const line of page.split("\n")) {
    const [, series, labelled = "", figure] = SERIES.exec(line) ?? [];
    if (series === undefined) continue;
    const labels = new Map([...labelled.matchAll(LABEL)].map(([, name, value]) => [name, value ?? ""]));
    const name = labels.get("tenant") ?? "";
    const tenant = found.get(name) ?? { tenant: name, requests: 0, prompt_tokens: 0, output_tokens: 0, running: 0, refused: {} };
    found.set(name, tenant);
    const value = Number(figure);
    if (series === "requests") tenant.requests = value;
    else if (series === "requests_in_flight") tenant.running = value;
    else if (series === "tokens" && labels.get("kind") === "prompt") tenant.prompt_tokens = value;
    else if (series === "tokens") tenant.output_tokens = value;
    else if (series === "refused" && value > 0) tenant.refused[labels.get("reason") ?? ""] = value;
  }
  return [...found.values()];
}
