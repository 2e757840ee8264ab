// Numbers as people read them: three significant digits, and a unit that fits.

const DASH = "–";

/** Seconds, from microseconds to days. */
export function seconds(value: number | null | undefined): string {
  if (value === null || value === undefined) return DASH;
  if (value === 0) return "0 ms";
  const size = Math.abs(value);
  if (size < 1e-3) return `${digits(value * 1e6)} µs`;
  if (size < 1) return `${digits(value * 1e3)} ms`;
  if (size < 120) return `${digits(value)} s`;
  if (size < 7200) return `${digits(value / 60)} min`;
  return size < 172_800 ? `${digits(value / 3600)} h` : `${digits(value / 86_400)} d`;
}

/** A count, in full up to 99,999. */
export function count(value: number | null | undefined): string {
  if (value === null || value === undefined) return DASH;
  const size = Math.abs(value);
  if (size < 100_000) return Math.round(value).toLocaleString("en");
  if (size < 1e6) return `${digits(value / 1e3)} k`;
  return size < 1e9 ? `${digits(value / 1e6)} M` : `${digits(value / 1e9)} G`;
}

/** A fraction as a percentage. */
export function percent(value: number | null | undefined): string {
  if (value === null || value === undefined) return DASH;
  const shown = value * 100;
  return `${shown > 0 && shown < 10 ? shown.toFixed(1) : Math.round(shown)} %`;
}

/** A rate per second. */
export function rate(value: number | null | undefined): string {
  return value === null || value === undefined ? DASH : value < 100 ? digits(value) : count(value);
}

function digits(value: number): string {
  const size = Math.abs(value);
  return value.toFixed(size >= 99.95 ? 0 : size >= 9.995 ? 1 : 2);
}
