// Where the time of a request went, as bars on one axis.

import { seconds } from "../lib/format";
import type { Span } from "../lib/types";

const NAMES: Record<string, string> = {
  queue: "router queue",
  tiers: "load from tiers",
  engine_queue: "engine queue",
  prefill: "prefill",
  transfer: "KV transfer",
  decode: "to the first token",
  stream: "stream",
};

export function Waterfall({ spans, total_s }: { spans: readonly Span[]; total_s: number }) {
  const total = Math.max(total_s, ...spans.map((each) => each.end_s), 1e-9);
  return (
    <div class="waterfall" role="table" aria-label="Phases of the request">
      {spans.map((each) => {
        const [left, width] = [(each.start_s / total) * 100, ((each.end_s - each.start_s) / total) * 100];
        return (
          <div class="lane" role="row" key={`${each.phase}${each.start_s}`}>
            <span role="rowheader">{NAMES[each.phase] ?? each.phase}</span>
            <span role="cell" class="axis" title={`${seconds(each.start_s)} to ${seconds(each.end_s)}`}>
              <span class={`span ${each.phase}`} style={{ left: `${left}%`, width: `max(2px, ${width}%)` }} />
            </span>
            <span role="cell" class="number">
              {seconds(each.end_s - each.start_s)}
            </span>
            <span role="cell" class="quiet">
              {each.worker ?? ""}
            </span>
          </div>
        );
      })}
    </div>
  );
}

/** The same in the width of a table's cell: waiting, until the first token, and streaming. */
export function MiniWaterfall({
  queued_s,
  ttft_s,
  end_s,
  scale_s,
}: {
  queued_s: number | null;
  ttft_s: number | null;
  end_s: number;
  scale_s: number;
}) {
  const waited = Math.min(end_s, queued_s ?? end_s);
  const first = Math.min(end_s, ttft_s ?? end_s);
  const parts: [string, number][] = [
    ["queue", waited],
    ["prefill", Math.max(0, first - waited)],
    ["stream", Math.max(0, end_s - first)],
  ];
  const text = `queue ${seconds(waited)}, to the first token ${seconds(parts[1]![1])}, stream ${seconds(parts[2]![1])}`;
  return (
    <span class="mini" role="img" aria-label={text} title={text}>
      {parts.map(([name, length]) => (
        <span key={name} class={`span ${name}`} style={{ width: `${(length / Math.max(scale_s, 1e-9)) * 100}%` }} />
      ))}
    </span>
  );
}
