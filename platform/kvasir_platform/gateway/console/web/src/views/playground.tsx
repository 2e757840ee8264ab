// Chat with what is served, and see under each answer what it took.

import { useEffect, useRef, useState } from "preact/hooks";
import { ApiError, getJson, keepKey, keyOf } from "../lib/api";
import { ask, bodyOf, itlOf, NOTHING, type Answer, type Message, type Settings, type Side } from "../lib/chat";
import { count, percent, rate, seconds } from "../lib/format";
import type { Status } from "../lib/types";
import { Empty, Section } from "../parts/basics";
import { requestLink } from "./requests";
import { ANYONE, nameOf, Ran, SideFields } from "./sides";

interface Turn {
  prompt: string;
  sides: readonly Side[];
  answers: (Answer | null)[];
  errors: string[];
}

const SCHEMA = '{"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]}';
const TOOLS = '[{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}]';

export function Playground({ status }: { status: Status }) {
  const [key, setKey] = useState(keyOf("client"));
  const [models, setModels] = useState<readonly string[] | null>(null);
  const [problem, setProblem] = useState("");
  const [sides, setSides] = useState<readonly Side[]>([ANYONE]);
  const [settings, setSettings] = useState<Settings>({ system: "", temperature: 0.7, max_tokens: 256, schema: "", tools: "" });
  const [turns, setTurns] = useState<readonly Turn[]>([]);
  const [busy, setBusy] = useState(false);
  const stop = useRef<AbortController | null>(null);

  useEffect(() => {
    const left = new AbortController();
    setProblem("");
    getJson<{ data: { id: string; task: string }[] }>("v1/models", "client", left.signal)
      .then(({ data }) => {
        const names = data.filter((each) => each.task !== "embed").map((each) => each.id);
        setModels(names);
        setSides((before) => before.map((each) => (names.includes(each.model) ? each : { ...ANYONE, model: names[0] ?? "" })));
      })
      .catch((error: unknown) => {
        if (error instanceof ApiError) setProblem(error.message);
      });
    return () => left.abort();
  }, [key]);
  useEffect(() => () => stop.current?.abort(), []);

  const send = async (prompt: string): Promise<void> => {
    const earlier = turns;
    const turn: Turn = { prompt, sides, answers: sides.map(() => null), errors: sides.map(() => "") };
    const update = (side: number, change: { answer?: Answer; error?: string }): void =>
      setTurns((before) => {
        const last = before.at(-1);
        if (last === undefined) return before;
        const answers = last.answers.map((each, i) => (i === side ? (change.answer ?? each) : each));
        const errors = last.errors.map((each, i) => (i === side ? (change.error ?? each) : each));
        return [...before.slice(0, -1), { ...last, answers, errors }];
      });
    setTurns([...earlier, turn]);
    setBusy(true);
    const aborter = (stop.current = new AbortController());
    await Promise.all(
      sides.map(async (chosen, side) => {
        try {
          const body = bodyOf(chosen.model, [...conversation(earlier, side), { role: "user", content: prompt }], settings);
          await ask(body, chosen, (answer) => update(side, { answer }), aborter.signal);
        } catch (error) {
          const stopped = error instanceof DOMException && error.name === "AbortError";
          update(side, { error: stopped ? "Stopped." : error instanceof Error ? error.message : String(error) });
        }
      }),
    );
    setBusy(false);
  };

  return (
    <div class="playground">
      <aside aria-label="Settings">
        {sides.map((chosen, side) => (
          <SideFields
            key={side}
            side={chosen}
            title={sides.length > 1 ? `Answer ${side + 1}` : "Answer"}
            models={models ?? []}
            status={status}
            on={(changed) => setSides(sides.map((each, i) => (i === side ? changed : each)))}
          />
        ))}
        <label class="check">
          <input
            type="checkbox"
            checked={sides.length > 1}
            disabled={busy}
            onChange={(event) => {
              setTurns([]);
              const first = sides[0] ?? ANYONE;
              setSides(event.currentTarget.checked ? [first, { ...ANYONE, model: models?.[1] ?? first.model }] : [first]);
            }}
          />{" "}
          two answers side by side
        </label>
        <label>
          API key of a client
          <input
            type="password"
            autocomplete="off"
            value={key}
            placeholder={keyOf("operator") === "" ? "not needed without keys" : "empty: the operator's"}
            onChange={(event) => {
              keepKey("client", event.currentTarget.value.trim());
              setKey(event.currentTarget.value.trim());
            }}
          />
        </label>
        <label>
          System message
          <textarea rows={2} value={settings.system} onInput={(event) => setSettings({ ...settings, system: event.currentTarget.value })} />
        </label>
        <div class="two">
          <label>
            Temperature
            <input type="number" min={0} max={2} step={0.1} value={settings.temperature} onInput={(event) => setSettings({ ...settings, temperature: Number(event.currentTarget.value) })} />
          </label>
          <label>
            Max tokens
            <input type="number" min={1} step={1} value={settings.max_tokens} onInput={(event) => setSettings({ ...settings, max_tokens: Number(event.currentTarget.value) })} />
          </label>
        </div>
        <Extra name="JSON schema" example={SCHEMA} value={settings.schema} on={(schema) => setSettings({ ...settings, schema })} />
        <Extra name="Tools" example={TOOLS} value={settings.tools} on={(tools) => setSettings({ ...settings, tools })} />
        <button type="button" disabled={busy || turns.length === 0} onClick={() => setTurns([])}>
          New conversation
        </button>
      </aside>
      <div class="talk">
        <div class="turns" aria-live="polite">
          {problem !== "" && <Empty title="The models cannot be listed.">{problem}</Empty>}
          {models?.length === 0 && <Empty title="No model answers chats.">The deployment serves embeddings only, or this key may use none of its models.</Empty>}
          {turns.length === 0 && problem === "" && models?.length !== 0 && <Empty title="Nothing was asked yet.">Answers stream here, with their timing.</Empty>}
          {turns.map((turn, i) => (
            <Section key={i} title={turn.prompt}>
              <div class={`sides of-${turn.answers.length}`}>
                {turn.answers.map((answer, side) => (
                  <AnswerBox key={side} side={turn.sides[side]} titled={turn.answers.length > 1} answer={answer} error={turn.errors[side] ?? ""} />
                ))}
              </div>
            </Section>
          ))}
        </div>
        <Composer busy={busy} ready={sides.every((each) => each.model !== "")} send={(prompt) => void send(prompt)} stop={() => stop.current?.abort()} />
      </div>
    </div>
  );
}

function conversation(turns: readonly Turn[], side: number): Message[] {
  return turns.flatMap((turn): Message[] => {
    const answer = turn.answers[side];
    if (!answer?.text) return [];
    return [
      { role: "user", content: turn.prompt },
      { role: "assistant", content: answer.text },
    ];
  });
}

function Extra({ name, example, value, on }: { name: string; example: string; value: string; on: (value: string) => void }) {
  return (
    <details>
      <summary>
        {name}
        {value.trim() !== "" && <span class="quiet"> in use</span>}
      </summary>
      <textarea rows={6} spellcheck={false} aria-label={name} value={value} placeholder={example} onInput={(event) => on(event.currentTarget.value)} />
      <button type="button" onClick={() => on(value.trim() === "" ? example : "")}>
        {value.trim() === "" ? "Use the example" : "Clear"}
      </button>
    </details>
  );
}

function AnswerBox({ side, titled, answer, error }: { side: Side | undefined; titled: boolean; answer: Answer | null; error: string }) {
  const shown = answer ?? NOTHING;
  const cached = shown.usage?.prompt_tokens_details?.cached_tokens ?? 0;
  const itl = itlOf(shown);
  const waiting = answer === null && error === "";
  return (
    <article class="answer" aria-busy={waiting}>
      {titled && side !== undefined && <h3>{nameOf(side)}</h3>}
      {shown.reasoning !== "" && <p class="reasoning">{shown.reasoning}</p>}
      {shown.text !== "" && <p class="text">{shown.text}</p>}
      {shown.calls.map((call, i) => (
        <pre key={i}>{`${call.name}(${call.arguments})`}</pre>
      ))}
      {waiting && <p class="quiet">waiting for the first token …</p>}
      {error !== "" && <p class="error">{error}</p>}
      {shown.ttft_s !== null && (
        <dl class="timing">
          <dt>TTFT</dt>
          <dd>{seconds(shown.ttft_s)}</dd>
          <dt>ITL</dt>
          <dd>{seconds(itl)}</dd>
          <dt>tokens/s</dt>
          <dd>{itl === null || itl === 0 ? "–" : rate(1 / itl)}</dd>
          <dt>output</dt>
          <dd>{count(shown.usage?.completion_tokens)}</dd>
          <dt>prompt</dt>
          <dd>{count(shown.usage?.prompt_tokens)}</dd>
          <dt>cached</dt>
          <dd>{shown.usage === null ? "–" : `${count(cached)} (${percent(cached / Math.max(1, shown.usage.prompt_tokens))})`}</dd>
          <dt>total</dt>
          <dd>{seconds(shown.total_s)}</dd>
          {shown.finish !== null && (
            <>
              <dt>finish</dt>
              <dd>{shown.finish}</dd>
            </>
          )}
          {shown.total_s !== null && shown.request_id !== "" && <Ran id={shown.request_id} side={side} />}
          {shown.request_id !== "" && (
            <dd>
              <a href={requestLink(shown.request_id)}>why it ran where it ran</a>
            </dd>
          )}
        </dl>
      )}
    </article>
  );
}

function Composer({ busy, ready, send, stop }: { busy: boolean; ready: boolean; send: (prompt: string) => void; stop: () => void }) {
  const [prompt, setPrompt] = useState("");
  const submit = (): void => {
    if (busy || !ready || prompt.trim() === "") return;
    send(prompt);
    setPrompt("");
  };
  return (
    <form
      class="composer"
      onSubmit={(event) => {
        event.preventDefault();
        submit();
      }}
    >
      <textarea
        rows={3}
        aria-label="Prompt"
        placeholder="Ask something; Enter sends, Shift and Enter begins a line"
        value={prompt}
        onInput={(event) => setPrompt(event.currentTarget.value)}
        onKeyDown={(event) => {
          if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
            event.preventDefault();
            submit();
          }
        }}
      />
      {busy ? (
        <button type="button" onClick={stop}>
          Stop
        </button>
      ) : (
        <button type="submit" class="primary" disabled={!ready || prompt.trim() === ""}>
          Send
        </button>
      )}
    </form>
  );
}
