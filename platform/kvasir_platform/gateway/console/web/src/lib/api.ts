// Calls to the gateway that served this page. Addresses are relative to it, and keys travel in a header:
// neither ever stands in an address.

const OPERATOR = "kvasir-operator-key";
const CLIENT = "kvasir-client-key";

export type Who = "operator" | "client";

export class ApiError extends Error {
  constructor(
    readonly status: number,
    readonly code: string,
    message: string,
  ) {
    super(message);
  }
}

/** The key that is kept until the tab is closed; "" for none. */
export function keyOf(who: Who): string {
  return sessionStorage.getItem(who === "operator" ? OPERATOR : CLIENT) ?? "";
}

export function keepKey(who: Who, key: string): void {
  const name = who === "operator" ? OPERATOR : CLIENT;
  if (key === "") sessionStorage.removeItem(name);
  else sessionStorage.setItem(name, key);
}

/** Call a path below the gateway's root. Rejects with ApiError. */
export async function call(
  path: string,
  { who = "operator", body, signal, headers: more = {} }: { who?: Who; body?: unknown; signal?: AbortSignal; headers?: Record<string, string> } = {},
): Promise<Response> {
  const headers: Record<string, string> = { ...more };
  const key = who === "client" ? keyOf("client") || keyOf("operator") : keyOf("operator");
  if (key !== "") headers["authorization"] = `Bearer ${key}`;
  const options: RequestInit = { headers, cache: "no-store", credentials: "omit" };
  if (body !== undefined) {
    headers["content-type"] = "application/json";
    options.method = "POST";
    options.body = JSON.stringify(body);
  }
  if (signal !== undefined) options.signal = signal;
  let answer: Response;
  try {
    answer = await fetch(`../${path}`, options);
  } catch (error) {
    if (error instanceof DOMException && error.name === "AbortError") throw error;
    throw new ApiError(0, "unreachable", "The gateway does not answer.");
  }
  if (!answer.ok) throw await failure(answer);
  return answer;
}

export async function getJson<T>(path: string, who: Who = "operator", signal?: AbortSignal): Promise<T> {
  const answer = await call(path, signal === undefined ? { who } : { who, signal });
  return (await answer.json()) as T;
}

async function failure(answer: Response): Promise<ApiError> {
  try {
    const { error } = (await answer.json()) as { error: { code: string; message: string } };
    return new ApiError(answer.status, error.code, error.message);
  } catch {
    return new ApiError(answer.status, "unknown", `The gateway answered with status ${answer.status}.`);
  }
}
