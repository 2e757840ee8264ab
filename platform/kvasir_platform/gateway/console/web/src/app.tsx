// The frame: which view, whether a key is needed, and how fresh the data is.

import { useEffect, useMemo, useState } from "preact/hooks";
import { keepKey, keyOf, type ApiError } from "./lib/api";
import { History } from "./lib/history";
import { useLive } from "./lib/live";
import { seconds } from "./lib/format";
import { Empty } from "./parts/basics";
import { Fleet } from "./views/fleet";
import { Playground } from "./views/playground";
import { Prefixes } from "./views/prefixes";
import { RequestPage } from "./views/request";
import { RequestList } from "./views/requests";
import { Scaling } from "./views/scaling";
import { Tenants } from "./views/tenants";

const VIEWS = ["fleet", "requests", "playground", "scaling", "prefixes", "tenants"] as const;
const OLD_MS = 5000;

function route(): [string, string] {
  const [view = "", ...rest] = location.hash.replace(/^#\/?/, "").split("/");
  return [view === "" ? "fleet" : view, decoded(rest.join("/"))];
}

/** Undo encodeURIComponent; text that it did not make stays as it is. */
function decoded(text: string): string {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

export function App() {
  const [[view, item], setRoute] = useState(route);
  const [session, setSession] = useState(0);
  useEffect(() => {
    const changed = (): void => setRoute(route());
    window.addEventListener("hashchange", changed);
    return () => window.removeEventListener("hashchange", changed);
  }, []);
  return <Signed key={session} view={view} item={item} again={() => setSession(session + 1)} />;
}

function Signed({ view, item, again }: { view: string; item: string; again: () => void }) {
  const history = useMemo(() => new History(), []);
  const listed = view === "requests" && item === "";
  const { status, requests } = useLive(listed ? ["status", "requests"] : ["status"], (data) => history.status(data));
  useEffect(() => {
    document.title = status.data === null ? "Kvasir" : `${status.data.deployment} · Kvasir`;
  }, [status.data?.deployment]);
  const { error, data } = status;
  if (error?.status === 401 || error?.status === 403) return <SignIn error={error} again={again} />;
  return (
    <>
      <a class="skip" href="#main" onClick={(event) => (event.preventDefault(), document.getElementById("main")?.focus())}>
        Skip to the content
      </a>
      <header class="top">
        <span class="brand">
          <strong>Kvasir</strong> {data?.deployment}
        </span>
        <nav aria-label="Views">
          {VIEWS.map((each) => (
            <a key={each} href={`#/${each}`} aria-current={each === view ? "page" : undefined}>
              {each}
            </a>
          ))}
        </nav>
        <Freshness at={status.at} error={error} />
        <Theme />
        {keyOf("operator") !== "" && (
          <button
            type="button"
            onClick={() => {
              keepKey("operator", "");
              keepKey("client", "");
              again();
            }}
          >
            Sign out
          </button>
        )}
      </header>
      <main id="main" tabIndex={-1}>
        {data === null ? (
          error === null ? (
            <Empty title="Reading the status …" />
          ) : (
            <Empty title="The status cannot be read.">{error.message} It is asked for again in a few seconds.</Empty>
          )
        ) : listed ? (
          <RequestList seen={requests} />
        ) : view === "requests" ? (
          <RequestPage key={item} id={item} />
        ) : view === "playground" ? (
          <Playground status={data} />
        ) : view === "scaling" ? (
          <Scaling status={data} history={history} />
        ) : view === "prefixes" ? (
          <Prefixes />
        ) : view === "tenants" ? (
          <Tenants />
        ) : view === "fleet" ? (
          <Fleet status={data} history={history} />
        ) : (
          <Empty title={`There is no view ${view}.`}>
            <a href="#/fleet">Go to the fleet</a>
          </Empty>
        )}
      </main>
    </>
  );
}

function Freshness({ at, error }: { at: number; error: ApiError | null }) {
  const [now, setNow] = useState(performance.now());
  useEffect(() => {
    const timer = window.setInterval(() => setNow(performance.now()), 1000);
    return () => window.clearInterval(timer);
  }, []);
  const age = now - at;
  if (at === 0) return <span class="fresh" />;
  if (error !== null || age > OLD_MS)
    return (
      <span class="fresh bad" role="alert">
        ▲ data is {seconds(Math.round(age / 1000))} old{error === null ? "" : `: ${error.message}`}
      </span>
    );
  return <span class="fresh quiet">live</span>;
}

function Theme() {
  const [theme, setTheme] = useState(localStorage.getItem("kvasir-theme") ?? "auto");
  useEffect(() => {
    if (theme === "auto") {
      delete document.documentElement.dataset["theme"];
      localStorage.removeItem("kvasir-theme");
    } else {
      document.documentElement.dataset["theme"] = theme;
      localStorage.setItem("kvasir-theme", theme);
    }
  }, [theme]);
  return (
    <label class="theme">
      Theme{" "}
      <select value={theme} onChange={(event) => setTheme(event.currentTarget.value)}>
        <option value="auto">as the system</option>
        <option value="light">light</option>
        <option value="dark">dark</option>
      </select>
    </label>
  );
}

function SignIn({ error, again }: { error: ApiError; again: () => void }) {
  const tried = keyOf("operator") !== "";
  return (
    <main class="sign-in">
      <form
        onSubmit={(event) => {
          event.preventDefault();
          const key = new FormData(event.currentTarget).get("key");
          keepKey("operator", typeof key === "string" ? key.trim() : "");
          again();
        }}
      >
        <h1>Kvasir</h1>
        <p>The console shows the requests of all tenants, so it needs the API key of an operator.</p>
        <label>
          API key
          <input name="key" type="password" autocomplete="off" autofocus required />
        </label>
        {tried && (
          <p class="error" role="alert">
            {error.status === 403 ? "This is the key of a tenant who is no operator. " : ""}
            {error.message}
          </p>
        )}
        <button type="submit" class="primary">
          Open the console
        </button>
        <p class="quiet">
          It is kept in this tab until the tab is closed. A key is an operator's if its tenant has <code>operator: true</code>, or if it
          has no tenant; <code>kvasir keys new</code> makes one.
        </p>
      </form>
    </main>
  );
}
