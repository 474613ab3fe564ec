/** The server's routes, and one kind of error for all that can go wrong with them. */

import { events } from "./sse.js";

const KEY = "codd.key";

/** @typedef {"busy"|"rejected"|"key"|"closing"|"deadline"|"gone"|"failed"} Kind */

/** What the server refused or failed to do, in the server's own words where it has any. */
export class Problem extends Error {
  /**
   * @param {Kind} kind
   * @param {string} message
   * @param {{param?: string|null, retryAfter?: number}} [more]
   */
  constructor(kind, message, { param = null, retryAfter = 0 } = {}) {
    super(message);
    this.kind = kind;
    this.param = param;
    this.retryAfter = retryAfter;
  }
}

/** @type {Record<number, Kind>} */
const KINDS = { 400: "rejected", 401: "key", 413: "rejected", 422: "rejected", 429: "busy", 503: "closing", 504: "deadline" };

/** Kept for this tab only, and never put into a link. */
export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  /** @param {string} value */
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

/** @param {AbortSignal} [signal] */
export async function models(signal) {
  return (await (await ask("v1/models", { signal })).json()).data;
}

/** Whether the server answers, and takes requests. */
export async function healthy() {
  try {
    return (await ask("health", { signal: AbortSignal.timeout(4000) })).ok;
  } catch {
    return false;
  }
}

/**
 * @param {object} body
 * @param {AbortSignal} signal
 */
export async function inspect(body, signal) {
  return (await post("v1/inspect", body, signal)).json();
}

/**
 * How large a constraint is: its states, and the fewest tokens of a text.
 * @param {object} body
 * @param {AbortSignal} signal
 * @returns {Promise<{states: number, shortest: number}>}
 */
export async function compile(body, signal) {
  return (await post("v1/constraint", body, signal)).json();
}

/**
 * The events of a run; an error among them is thrown.
 * @param {object} body
 * @param {AbortSignal} signal
 */
export async function* denoise(body, signal) {
  const response = await post("v1/denoise", { ...body, stream: true }, signal);
  let complete = false;
  try {
    for await (const { event, data } of events(response)) {
      if (event === "error") throw problem(data.error);
      complete ||= event === "done";
      yield { event, data };
    }
  } catch (error) {
    throw asProblem(error, signal);
  }
  if (!complete) throw new Problem("gone", "The answer broke off.");
}

/**
 * @param {string} path
 * @param {object} body
 * @param {AbortSignal} signal
 */
function post(path, body, signal) {
  return ask(path, { method: "POST", body: JSON.stringify(body), headers: { "Content-Type": "application/json" }, signal });
}

/**
 * @param {string} path relative, so that the page also works behind a prefix
 * @param {RequestInit} init
 */
async function ask(path, init) {
  const headers = { ...init.headers, ...(key.get() ? { Authorization: `Bearer ${key.get()}` } : {}) };
  let response;
  try {
    response = await fetch(path, { ...init, headers });
  } catch (error) {
    throw asProblem(error, init.signal);
  }
  if (response.ok) return response;
  const found = await response.json().catch(() => null);
  const kind = KINDS[response.status] ?? "failed";
  const retryAfter = Number(response.headers.get("Retry-After")) || 0;
  throw new Problem(kind, found?.error?.message ?? `The server answered ${response.status}.`, { param: found?.error?.param, retryAfter });
}

/**
 * An error that came as an event, when the status was already sent.
 * @param {{message?: string, type?: string, code?: string|null, param?: string|null}} error
 */
function problem(error) {
  const hint = `${error.type ?? ""} ${error.code ?? ""}`;
  /** @type {Kind} */
  const kind = /timeout|deadline/.test(hint) ? "deadline" : /shut|drain|unavailable/.test(hint) ? "closing" : "failed";
  return new Problem(kind, error.message ?? "The run failed.", { param: error.param });
}

/**
 * An abort stays what it is; anything else that fetch throws means that nobody answered.
 * @param {unknown} error
 * @param {AbortSignal|null} [signal]
 */
function asProblem(error, signal) {
  if (error instanceof Problem || signal?.aborted) return error;
  return new Problem("gone", "The server does not answer.");
}
