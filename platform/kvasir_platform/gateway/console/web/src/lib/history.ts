// What the console has seen since it was opened: enough for a minute's figures and two minutes of a line.

import { quantile } from "./format";
import type { Requests, Status } from "./types";

const WINDOW_MS = 60_000;
const MOST_ENDED = 4000;
const MOST_POINTS = 120;

interface Point {
  at: number;
  hits: number;
  queries: number;
}

interface Past {
  at: number;
  ttft: number | null;
  itl: number | null;
}

export interface Figures {
  ttft: readonly [number | null, number | null];
  itl: readonly [number | null, number | null];
  hitRate: number | null;
  ended: number;
}

/** Counters of workers fall when one restarts; such steps count as nothing. */
export class History {
  readonly lines = new Map<string, number[]>();
  private ended = new Map<string, Past>();
  private points: Point[] = [];
  private last = new Map<string, [number, number]>();
  private hits = 0;
  private queries = 0;

  status(status: Status, now: number): void {
    const known = this.last;
    this.last = new Map();
    for (const { worker_id, load } of status.workers) {
      if (load === null) continue;
      const [hits, queries] = known.get(worker_id) ?? [load.prefix_hits_tokens, load.prefix_queries_tokens];
      this.hits += Math.max(0, load.prefix_hits_tokens - hits);
      this.queries += Math.max(0, load.prefix_queries_tokens - queries);
      this.last.set(worker_id, [load.prefix_hits_tokens, load.prefix_queries_tokens]);
    }
    this.points.push({ at: now, hits: this.hits, queries: this.queries });
    while (this.points.length > 1 && now - this.points[0]!.at > WINDOW_MS) this.points.shift();
    this.line("in_flight", status.in_flight);
    this.line("queued", queuedIn(status));
    for (const pool of status.pools ?? []) {
      this.line(`serving/${pool.pool}`, pool.serving);
      this.line(`desired/${pool.pool}`, pool.desired);
      if (pool.forecast !== null) {
        this.line(`load/${pool.pool}`, pool.forecast.load);
        this.line(`expected/${pool.pool}`, pool.forecast.expected);
        this.line(`upper/${pool.pool}`, pool.forecast.upper);
      }
    }
    const figures = this.figures(now);
    this.line("ttft", figures.ttft[0] ?? 0);
    this.line("itl", figures.itl[0] ?? 0);
    this.line("hit_rate", figures.hitRate ?? 0);
  }

  requests(requests: Requests, now: number): void {
    for (const each of requests.latest) {
      const at = now - each.ended_s_ago * 1000;
      if (each.outcome === "ok" && now - at < WINDOW_MS && !this.ended.has(each.request_id))
        this.ended.set(each.request_id, { at, ttft: each.ttft_s, itl: each.itl_s });
    }
    for (const [id, past] of this.ended)
      if (now - past.at > WINDOW_MS || this.ended.size > MOST_ENDED) this.ended.delete(id);
  }

  figures(now: number): Figures {
    const recent = [...this.ended.values()].filter((each) => now - each.at <= WINDOW_MS);
    const ttft = recent.flatMap((each) => each.ttft ?? []);
    const itl = recent.flatMap((each) => each.itl ?? []);
    const [first, last] = [this.points[0], this.points.at(-1)];
    const asked = first && last ? last.queries - first.queries : 0;
    return {
      ttft: [quantile(ttft, 0.5), quantile(ttft, 0.95)],
      itl: [quantile(itl, 0.5), quantile(itl, 0.95)],
      hitRate: first && last && asked > 0 ? (last.hits - first.hits) / asked : null,
      ended: recent.length,
    };
  }

  private line(name: string, value: number): void {
    const line = this.lines.get(name) ?? [];
    line.push(value);
    if (line.length > MOST_POINTS) line.shift();
    this.lines.set(name, line);
  }
}

export function queuedIn(status: Status): number {
  return Object.values(status.queues ?? {}).reduce((sum, each) => sum + each.queued + each.parked, 0);
}
