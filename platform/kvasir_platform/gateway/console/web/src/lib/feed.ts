// One page of data, asked for again each second while the tab is visible.

import { useEffect, useState } from "preact/hooks";
import { ApiError, call } from "./api";

export const INTERVAL_MS = 1000;
export const SLOWEST_MS = 15_000;

export interface Seen<T> {
  data: T | null;
  error: ApiError | null;
  /** When `data` came, in milliseconds of performance.now(). */
  at: number;
}

/** JSON of a page. `on` gets what comes; after data for which `last` holds, nothing more is asked. */
export function useFeed<T>(
  path: string,
  on?: (data: T) => void,
  last?: (data: T) => boolean,
  interval_ms = INTERVAL_MS,
): Seen<T> {
  return usePage<T>(path, (answer) => answer.json() as Promise<T>, interval_ms, on, last);
}

/** Text of a page that is larger, and asked for less often. */
export function useText(path: string): Seen<string> {
  return usePage(path, (answer) => answer.text(), 5 * INTERVAL_MS);
}

/** Ask while mounted. Failures are repeated less and less often. */
function usePage<T>(
  path: string,
  read: (answer: Response) => Promise<T>,
  interval_ms: number,
  on?: (data: T) => void,
  last?: (data: T) => boolean,
): Seen<T> {
  const [seen, setSeen] = useState<Seen<T>>({ data: null, error: null, at: 0 });
  useEffect(() => {
    setSeen({ data: null, error: null, at: 0 });
    let timer = 0;
    let pause = interval_ms;
    const stop = new AbortController();
    const ask = async (): Promise<void> => {
      try {
        const data = await read(await call(path, { signal: stop.signal }));
        if (stop.signal.aborted) return;
        pause = interval_ms;
        on?.(data);
        setSeen({ data, error: null, at: performance.now() });
        if (last?.(data)) return;
      } catch (caught) {
        if (stop.signal.aborted) return;
        const error = caught instanceof ApiError ? caught : new ApiError(0, "unreachable", "The answer broke off.");
        pause = Math.min(SLOWEST_MS, pause * 2);
        setSeen((before) => ({ ...before, error }));
        if (error.status === 401 || error.status === 403 || error.status === 404) return;
      }
      again();
    };
    const again = (): void => {
      timer = window.setTimeout(() => (document.hidden ? again() : void ask()), pause);
    };
    void ask();
    return () => {
      stop.abort();
      window.clearTimeout(timer);
    };
  }, [path]);
  return seen;
}
