// Small parts that several views show.

import type { ComponentChildren } from "preact";
import { percent } from "../lib/format";
import type { Line } from "../lib/history";

export type Tone = "good" | "warn" | "bad" | "quiet";

const TONES: Record<string, Tone> = {
  ready: "good",
  healthy: "good",
  exact: "good",
  ok: "good",
  draining: "warn",
  connecting: "warn",
  interrupted: "bad",
  refused: "bad",
  slow_start: "warn",
  probing: "warn",
  ejected: "bad",
  unresponsive: "bad",
  catching_up: "warn",
  predicted: "quiet",
  client_closed: "quiet",
};

export function toneOf(state: string): Tone {
  return TONES[state] ?? "warn";
}

/** A state in words, with a mark whose shape says the same as its colour. */
export function State({ name, tone = toneOf(name), title }: { name: string; tone?: Tone; title?: string }) {
  return (
    <span class={`state ${tone}`} title={title}>
      <span aria-hidden="true">{tone === "good" ? "●" : tone === "bad" ? "▲" : tone === "warn" ? "◆" : "○"}</span>
      {name.replaceAll("_", " ")}
    </span>
  );
}

/** A fraction as a bar with its figure. */
export function Bar({ value, label, tone }: { value: number | null; label?: string; tone?: Tone }) {
  if (value === null) return <span class="quiet">–</span>;
  const shown = Math.min(1, Math.max(0, value));
  return (
    <span class="bar">
      <span class="track" aria-hidden="true">
        <span class={`fill ${tone ?? (shown > 0.95 ? "warn" : "plain")}`} style={{ width: `${shown * 100}%` }} />
      </span>
      <span>{label ?? percent(value)}</span>
    </span>
  );
}

type Point = readonly [number, number];

/** The parts of a line between its gaps, each as the places of its points and their values. */
function parts(line: Line): Point[][] {
  const found: Point[][] = [];
  let open = false;
  line.forEach((value, i) => {
    if (value === null) open = false;
    else if (open) found.at(-1)!.push([i, value]);
    else found.push([[i, value]]), (open = true);
  });
  return found;
}

/** The points of an SVG line. A single one is drawn as a dot, by the round ends of a line to itself. */
function drawn(part: readonly Point[], at: (point: Point) => string): string {
  return (part.length === 1 ? [part[0]!, part[0]!] : part).map(at).join(" ");
}

function highest(lines: readonly Line[]): number {
  return Math.max(1e-9, ...lines.flat().map((each) => each ?? 0));
}

/** A line of the last minutes, without axes: its last value stands beside it. What is not known is a gap. */
export function Spark({ values, label }: { values: Line; label: string }) {
  const width = 120;
  const height = 24;
  const top = highest([values]);
  const step = width / Math.max(1, values.length - 1);
  const at = ([i, value]: Point) => `${(i * step).toFixed(1)},${(height - 2 - (value / top) * (height - 4)).toFixed(1)}`;
  return (
    <svg class="spark" viewBox={`0 0 ${width} ${height}`} preserveAspectRatio="none" role="img" aria-label={label}>
      {values.length > 1 && parts(values).map((part) => <polyline key={part[0]![0]} points={drawn(part, at)} />)}
    </svg>
  );
}

/** Two lines, and the band between two others, of equal lengths and with gaps at the same places. */
export function Band({ line, dashed, low, high, label }: { line: Line; dashed: Line; low: Line; high: Line; label: string }) {
  const width = 240;
  const height = 48;
  const most = Math.max(2, line.length);
  const top = highest([line, dashed, low, high]);
  const at = ([i, value]: Point) => `${((i * width) / (most - 1)).toFixed(1)},${(height - 2 - (value / top) * (height - 4)).toFixed(1)}`;
  const lower = parts(low);
  return (
    <svg class="band" viewBox={`0 0 ${width} ${height}`} preserveAspectRatio="none" role="img" aria-label={label}>
      {parts(high).map((part, i) => (
        <polygon key={part[0]![0]} points={[...part, ...[...(lower[i] ?? [])].reverse()].map(at).join(" ")} />
      ))}
      {parts(line).map((part) => (
        <polyline key={part[0]![0]} points={drawn(part, at)} />
      ))}
      {parts(dashed).map((part) => (
        <polyline key={part[0]![0]} class="dashed" points={drawn(part, at)} />
      ))}
    </svg>
  );
}

export function Figure({
  name,
  value,
  note,
  line,
}: {
  name: string;
  value: string;
  note?: string;
  line?: Line | undefined;
}) {
  return (
    <div class="figure">
      <div class="name">{name}</div>
      <div class="value">{value}</div>
      <div class="note">{note ?? "\u00a0"}</div>
      {line !== undefined && <Spark values={line} label={`${name} since the console was opened`} />}
    </div>
  );
}

/** Text of the gateway, whose commands and fields stand between backticks. */
export function Prose({ text }: { text: string }) {
  return <>{text.split("`").map((part, i) => (i % 2 === 0 ? part : <code key={i}>{part}</code>))}</>;
}

/** The field of a filter, with examples of what it finds. */
export function FilterField({ value, finds, on }: { value: string; finds: string; on: (value: string) => void }) {
  return (
    <label>
      Filter <input type="search" value={value} placeholder={finds} onInput={(event) => on(event.currentTarget.value)} />
    </label>
  );
}

/** What stands where there is nothing to show: why, and what to do. */
export function Empty({ title, children }: { title: string; children?: ComponentChildren }) {
  return (
    <div class="empty">
      <strong>{title}</strong>
      {children !== undefined && <div>{children}</div>}
    </div>
  );
}

export function Section({
  title,
  aside,
  children,
}: {
  title: string;
  aside?: ComponentChildren;
  children: ComponentChildren;
}) {
  return (
    <section aria-label={title}>
      <header>
        <h2>{title}</h2>
        {aside}
      </header>
      {children}
    </section>
  );
}
