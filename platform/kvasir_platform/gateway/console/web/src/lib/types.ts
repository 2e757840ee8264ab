// What the gateway's pages for operators hold: the parts that the console shows. Fields that an earlier or
// later gateway may lack are optional.

export interface Tier {
  medium: number;
  bytes_used?: number;
  bytes_capacity?: number;
  trouble?: string;
}

/** One GPU of a worker; the last two are null where its driver does not tell. */
export interface Gpu {
  index: number;
  busy: number;
  memory_used: number;
  memory_total: number;
  power_w: number;
  sm_active: number | null;
  dram_active: number | null;
}

export interface Load {
  running: number;
  waiting: number;
  kv_usage: number;
  kv_blocks_total: number;
  prefix_queries_tokens: number;
  prefix_hits_tokens: number;
  preemptions: number;
  transfers_failed: number;
  tiers?: Tier[];
  gpus?: Gpu[];
}

export interface Worker {
  worker_id: string;
  address: string;
  pool: string;
  state: string;
  reason: string;
  in_flight: number;
  model: string | null;
  role: string | null;
  assigned: string | null;
  engine: string | null;
  hardware: { device: string; devices: number } | null;
  load: Load | null;
  kv: { state: string; reason: string; blocks: number; predicted_blocks: number; resyncs: number } | null;
  health: { state: string; reason: string; share: number; ejections: number; panic: boolean };
  batch: { max_num_seqs: number | null } | null;
}

export interface Queue {
  queued: number;
  parked: number;
  wait_s: number;
  pressure: number;
  tokens_per_s: number;
  reserved_tokens: number;
  kv_tokens: number;
  brownout?: { level: number; text: string; fallback_model: string | null };
}

export interface Pool {
  pool: string;
  model: string;
  role: string;
  desired: number;
  serving: number;
  starting: number;
  forecast: Forecast | null;
}

/** In busy replicas. */
export interface Forecast {
  load: number;
  expected: number;
  upper: number;
  because: string[];
}

export interface Problem {
  severity: string;
  code: string;
  subject: string;
  text: string;
  remedy: string;
}

/** Requests that were answered in the last `over_s` seconds. */
export interface Recent {
  over_s: number;
  answered: number;
  ttft_s: number | null;
  ttft_p95_s: number | null;
  itl_s: number | null;
  itl_p95_s: number | null;
  hit_rate: number | null;
}

export interface Status {
  deployment: string;
  ready: boolean;
  reason: string | null;
  disaggregation: string;
  models: string[];
  readiness: Record<string, { ready: boolean; reason: string | null }>;
  in_flight: number;
  workers: Worker[];
  queues?: Record<string, Queue>;
  pools?: Pool[];
  verdict?: { ok: boolean; sentence: string; problems: Problem[] };
  policy?: string;
  policies?: string[];
  recent?: Recent | null;
}

export interface Running {
  request_id: string;
  model: string;
  tenant: string;
  slo: string;
  phase: "queued" | "prefilling" | "decoding";
  age_s: number;
  queued_s: number | null;
  ttft_s: number | null;
  prompt_tokens: number;
  output_tokens: number;
  predicted_cached_tokens: number;
  prefill_worker: string | null;
  decode_worker: string | null;
  retries: number;
  migrations: number;
}

export interface Ended {
  request_id: string;
  model: string;
  tenant: string;
  slo: string;
  outcome: string;
  ended_s_ago: number;
  e2e_s: number;
  ttft_s: number | null;
  itl_s: number | null;
  queued_s: number | null;
  slo_met: boolean | null;
  prompt_tokens: number;
  output_tokens: number;
  cached_tokens: number;
  prefill_worker: string | null;
  decode_worker: string | null;
  retries: number;
  migrations: number;
}

export interface Requests {
  in_flight: number;
  queued: number;
  running: Running[];
  slowest: Ended[];
  latest: Ended[];
}

export interface Place {
  worker_id: string;
  rank: number;
  pool: string;
  kv_state: string;
  facts: Record<string, number>;
  terms: Record<string, number | null>;
  total: number | null;
  chosen: boolean;
  link: string;
}

export interface Span {
  phase: string;
  start_s: number;
  end_s: number;
  worker: string | null;
}

/** What a request claims of one worker. */
export interface Claim {
  worker_id: string;
  pool: string;
  prefill_s: number;
  decode_s: number;
  kv_s: number;
  transfer_s: number;
  wasted_s: number;
}

export interface Timeline {
  request_id: string;
  model: string;
  tenant: string;
  slo: string;
  outcome: string | null;
  running: string | null;
  total_s: number;
  ttft_s: number | null;
  itl_s: number | null;
  prompt_tokens: number;
  output_tokens: number;
  cached_tokens: number;
  transferred_bytes: number;
  retries: number;
  migrations: number;
  phases: Span[];
  claims?: Claim[] | null;
}

export interface Decisions {
  decisions: Decision[];
  timelines?: Timeline[];
}

export interface Decision {
  request_id: string;
  policy: string;
  reason: string;
  mode: string;
  decided_in_s: number;
  attempt: number;
  prompt_tokens: number;
  expected_output_tokens: number;
  slo: string;
  prefill_worker: string | null;
  decode_worker: string;
  predicted_cached_tokens: number;
  predicted_ttft_s: number;
  parts: { part: string; unit: string; places: Place[] }[];
  omitted: number;
  queued_s: number;
  slo_ttft_s: number;
  slo_itl_s: number;
  outcome: string | null;
  actual_cached_tokens: number | null;
  actual_ttft_s: number | null;
  actual_itl_s: number | null;
  slo_met: boolean | null;
  regret_s: number | null;
  regret_causes: Record<string, number>;
  better: string[];
  better_ttft_s: number | null;
  rates: string;
}

export interface PrefixSurvey {
  model: string;
  block_tokens: number;
  blocks: number;
  complete: boolean;
  prefixes: { blocks: number; prompts: number; workers: string[] }[];
}

/** A line of a statement of costs. */
export interface CostLine {
  kind: "usage" | "wasted" | "idle";
  names: Record<string, string>;
  requests: number;
  prompt_tokens: number;
  cached_tokens: number;
  output_tokens: number;
  prefill_s: number;
  decode_s: number;
  kv_s: number;
  transfer_s: number;
  seconds: number;
  cost: number;
}

export interface Budget {
  tenant: string;
  period: string;
  spent: number;
  soft: number | null;
  hard: number | null;
  renews: number;
}

export interface CostPage {
  counted: boolean;
  currency: string;
  since: number;
  by: string[];
  lines: CostLine[];
  device_seconds: number;
  cost: number;
  budgets: Budget[];
  unpriced: string[];
  stored: boolean;
}
