/**
 * Server-sent events out of a fetch: EventSource can neither POST nor send a key.
 * @typedef {{event: string, data: any}} ServerEvent
 */

/**
 * Takes text in whatever chunks it arrives and calls back for every complete event.
 * @param {(event: ServerEvent) => void} found
 * @returns {(chunk: string) => void}
 */
export function parser(found) {
  let rest = "";
  let name = "";
  /** @type {string[]} */
  let data = [];

  /** @param {string} line */
  function read(line) {
    if (line === "") {
      if (data.length) found({ event: name || "message", data: JSON.parse(data.join("\n")) });
      name = "";
      data = [];
      return;
    }
    const colon = line.indexOf(":");
    if (colon === 0) return; // a comment: the server saying that it is still there
    const field = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
    if (field === "event") name = value;
    else if (field === "data") data.push(value);
  }

  return (chunk) => {
    rest += chunk;
    // A \r at the very end may be half of a \r\n: it waits for the next chunk.
    const lines = rest.split(/\r\n|\n|\r(?!$)/);
    rest = /** @type {string} */ (lines.pop());
    lines.forEach(read);
  };
}

/**
 * The events of an answer, as they come.
 * @param {Response} response
 * @returns {AsyncGenerator<ServerEvent>}
 */
export async function* events(response) {
  /** @type {ServerEvent[]} */
  const ready = [];
  const push = parser((event) => ready.push(event));
  const reader = /** @type {ReadableStream<Uint8Array>} */ (response.body).getReader();
  const decoder = new TextDecoder();
  try {
    for (;;) {
      const { value, done } = await reader.read();
      push(decoder.decode(value, { stream: !done }));
      while (ready.length) yield /** @type {ServerEvent} */ (ready.shift());
      if (done) return;
    }
  } finally {
    reader.cancel().catch(() => {}); // whoever stops listening frees the server's slot
  }
}
