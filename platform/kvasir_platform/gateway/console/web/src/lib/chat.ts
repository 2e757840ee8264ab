// One streamed answer of a chat, with the times at which its parts came.

import { call } from "./api";
import { events } from "./events";

export interface Message {
  role: "system" | "user" | "assistant";
  content: string;
}

export interface Settings {
  system: string;
  temperature: number;
  max_tokens: number;
  schema: string;
  tools: string;
}

/** Who answers: a model, and for operators the worker and the routing policy, each "" for any. */
export interface Side {
  model: string;
  worker: string;
  policy: string;
}

export interface Usage {
  prompt_tokens: number;
  completion_tokens: number;
  prompt_tokens_details?: { cached_tokens: number };
}

export interface Answer {
  text: string;
  reasoning: string;
  calls: { name: string; arguments: string }[];
  finish: string | null;
  request_id: string;
  ttft_s: number | null;
  last_s: number | null;
  total_s: number | null;
  usage: Usage | null;
}

interface Chunk {
  error?: { message: string };
  usage?: Usage;
  choices: {
    delta: {
      content?: string;
      reasoning?: string;
      tool_calls?: { index: number; function: { name?: string; arguments?: string } }[];
    };
    finish_reason: string | null;
  }[];
}

export const NOTHING: Answer = {
  text: "",
  reasoning: "",
  calls: [],
  finish: null,
  request_id: "",
  ttft_s: null,
  last_s: null,
  total_s: null,
  usage: null,
};

/** The body of a call. Throws SyntaxError for a schema or tools that are not JSON. */
export function bodyOf(model: string, messages: readonly Message[], settings: Settings): Record<string, unknown> {
  const system: Message[] = settings.system.trim() === "" ? [] : [{ role: "system", content: settings.system }];
  const body: Record<string, unknown> = {
    model,
    messages: [...system, ...messages],
    temperature: settings.temperature,
    max_tokens: settings.max_tokens,
    stream: true,
    stream_options: { include_usage: true },
  };
  if (settings.schema.trim() !== "") {
    const schema = parsed(settings.schema, "The JSON schema");
    body["response_format"] = { type: "json_schema", json_schema: { name: "answer", schema, strict: true } };
  }
  if (settings.tools.trim() !== "") body["tools"] = parsed(settings.tools, "The list of tools");
  return body;
}

function parsed(text: string, what: string): unknown {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new SyntaxError(`${what} is not JSON: ${error instanceof Error ? error.message : String(error)}`);
  }
}

/** Send a chat; `show` gets the answer after each piece. Rejects with ApiError, or with Error in mid-stream.
 *  Only operators may choose where it runs, so it is then sent with their key. */
export async function ask(
  body: Record<string, unknown>,
  side: Side,
  show: (answer: Answer) => void,
  signal: AbortSignal,
): Promise<void> {
  const began = performance.now();
  const since = (): number => (performance.now() - began) / 1000;
  const chosen = side.worker !== "" || side.policy !== "";
  const headers: Record<string, string> = {};
  if (side.worker !== "") headers["x-kvasir-worker"] = side.worker;
  if (side.policy !== "") headers["x-kvasir-policy"] = side.policy;
  const reply = await call("v1/chat/completions", { who: chosen ? "operator" : "client", body, signal, headers });
  let answer: Answer = { ...NOTHING, request_id: reply.headers.get("x-request-id") ?? "" };
  for await (const { data } of events(reply)) {
    if (data === "[DONE]") break;
    const chunk = JSON.parse(data) as Chunk;
    if (chunk.error !== undefined) throw new Error(chunk.error.message);
    answer = added(answer, chunk, since());
    show(answer);
  }
  show({ ...answer, total_s: since() });
}

function added(before: Answer, chunk: Chunk, now: number): Answer {
  const answer = { ...before, calls: before.calls.map((each) => ({ ...each })) };
  if (chunk.usage !== undefined) answer.usage = chunk.usage;
  const choice = chunk.choices[0];
  if (choice === undefined) return answer;
  const { content, reasoning, tool_calls } = choice.delta;
  answer.text += content ?? "";
  answer.reasoning += reasoning ?? "";
  for (const piece of tool_calls ?? []) {
    const call = (answer.calls[piece.index] ??= { name: "", arguments: "" });
    call.name += piece.function.name ?? "";
    call.arguments += piece.function.arguments ?? "";
  }
  if (content || reasoning || tool_calls) {
    answer.ttft_s ??= now;
    answer.last_s = now;
  }
  answer.finish = choice.finish_reason ?? answer.finish;
  return answer;
}

/** Mean seconds between two tokens; null for fewer than two. */
export function itlOf(answer: Answer): number | null {
  const tokens = answer.usage?.completion_tokens ?? 0;
  if (tokens < 2 || answer.ttft_s === null || answer.last_s === null) return null;
  return (answer.last_s - answer.ttft_s) / (tokens - 1);
}
