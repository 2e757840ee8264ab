// What the console has seen since it was opened: the last minutes of each line.

import type { Status } from "./types";

const MOST_POINTS = 120;

/** The points of a line, a second apart or, in a large fleet, more; null where nothing is known. */
export type Line = readonly (number | null)[];

export class History {
  readonly lines = new Map<string, (number | null)[]>();

  status(status: Status): void {
    this.line("in_flight", status.in_flight);
    this.line("queued", queuedIn(status));
    for (const { pool, serving, desired, forecast } of status.pools ?? []) {
      this.line(`serving/${pool}`, serving);
      this.line(`desired/${pool}`, desired);
      this.line(`load/${pool}`, forecast?.load);
      this.line(`expected/${pool}`, forecast?.expected);
      this.line(`upper/${pool}`, forecast?.upper);
    }
    this.line("ttft", status.recent?.ttft_s);
    this.line("itl", status.recent?.itl_s);
    this.line("hit_rate", status.recent?.hit_rate);
  }

  private line(name: string, value: number | null | undefined): void {
    const line = this.lines.get(name) ?? [];
    line.push(value ?? null);
    if (line.length > MOST_POINTS) line.shift();
    this.lines.set(name, line);
  }
}

export function queuedIn(status: Status): number {
  return Object.values(status.queues ?? {}).reduce((sum, each) => sum + each.queued + each.parked, 0);
}
