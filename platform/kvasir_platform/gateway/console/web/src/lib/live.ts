// What the gateway streams while the tab is visible: about once a second the status, and the requests where they are shown.

import { useEffect, useState } from "preact/hooks";
import { ApiError, call } from "./api";
import { events } from "./events";
import { INTERVAL_MS, SLOWEST_MS, type Seen } from "./feed";
import type { Requests, Status } from "./types";

export interface Live {
  status: Seen<Status>;
  requests: Seen<Requests>;
}

interface Failure {
  error?: { code: string; message: string };
}

const NOTHING: Live = {
  status: { data: null, error: null, at: 0 },
  requests: { data: null, error: null, at: 0 },
};

/** Follow the stream while mounted, of these pages. `on` gets each status. Failures are repeated less and less often. */
export function useLive(pages: readonly (keyof Live)[], on: (status: Status) => void): Live {
  const asked = pages.join(",");
  const [live, setLive] = useState(NOTHING);
  useEffect(() => {
    let timer = 0;
    let pause = INTERVAL_MS;
    let stop = new AbortController();
    let ended = false;
    const take = (name: string, data: Status & Requests & Failure): void => {
      if (name !== "status" && name !== "requests") return;
      if (data.error !== undefined) {
        const error = new ApiError(0, data.error.code, data.error.message);
        setLive((before) => ({ ...before, [name]: { ...before[name], error } }));
        return;
      }
      pause = INTERVAL_MS;
      if (name === "status") on(data);
      setLive((before) => ({ ...before, [name]: { data, error: null, at: performance.now() } }));
    };
    const follow = async (): Promise<void> => {
      try {
        const reply = await call(`console/live?pages=${asked}`, { signal: stop.signal });
        for await (const { name, data } of events(reply)) take(name, JSON.parse(data) as Status & Requests & Failure);
      } catch (caught) {
        if (stop.signal.aborted) return;
        const error = caught instanceof ApiError ? caught : new ApiError(0, "unreachable", "The stream broke off.");
        setLive((before) => ({ status: { ...before.status, error }, requests: { ...before.requests, error } }));
        if (error.status === 401 || error.status === 403 || error.status === 404) return;
      }
      if (stop.signal.aborted) return;
      timer = window.setTimeout(() => void follow(), pause);
      pause = Math.min(SLOWEST_MS, pause * 2);
    };
    const seen = (): void => {
      stop.abort();
      window.clearTimeout(timer);
      if (document.hidden || ended) return;
      stop = new AbortController();
      pause = INTERVAL_MS;
      void follow();
    };
    document.addEventListener("visibilitychange", seen);
    seen();
    return () => {
      ended = true;
      document.removeEventListener("visibilitychange", seen);
      seen();
    };
  }, [asked]);
  return live;
}
