/** The banner: what the server says when it does not do what was asked. */

import { healthy, key } from "./api.js";
import { byId } from "./dom.js";

const EVERY = 3000; // milliseconds between looks at a server that is gone

export class Notices {
  /** @param {{back: () => void, again: () => void}} handlers when the server is back; when a key was given */
  constructor({ back, again }) {
    this.back = back;
    this.again = again;
    this.looking = 0;
    byId("notice-close").addEventListener("click", () => this.clear());
    byId("key-form").addEventListener("submit", (/** @type {Event} */ event) => {
      event.preventDefault();
      key.set(byId("key").value);
      this.clear();
      this.again();
    });
  }

  /**
   * @param {string} words
   * @param {"info"|"wrong"} [look]
   */
  show(words, look = "info") {
    byId("notice").className = `notice ${look}`;
    byId("notice").hidden = false;
    byId("notice-text").textContent = words;
    byId("key-form").hidden = true;
  }

  clear() {
    clearTimeout(this.looking);
    this.looking = 0;
    byId("notice").hidden = true;
    byId("notice-text").textContent = "";
  }

  /** @param {import("./api.js").Problem} problem */
  report(problem) {
    if (problem.kind === "gone") this.#gone("The server does not answer. What is shown stays; looking for it every few seconds.");
    else if (problem.kind === "closing") this.#gone(`The server is shutting down: ${problem.message}`);
    else if (problem.kind === "deadline") this.show(`The deadline passed before the answer was complete: ${problem.message}`, "wrong");
    else if (problem.kind === "key") this.#askKey(problem.message);
    else this.show(problem.message, "wrong");
  }

  /** @param {string} message */
  #askKey(message) {
    this.show(key.get() ? `The server did not take the key: ${message}` : "This server asks for a key. It is kept for this tab only.", "wrong");
    key.set("");
    byId("key-form").hidden = false;
    byId("key").value = "";
    byId("key").focus();
  }

  /** @param {string} words */
  #gone(words) {
    this.show(words, "wrong");
    clearTimeout(this.looking);
    const look = async () => {
      if (!this.looking) return;
      if (!(await healthy())) {
        if (this.looking) this.looking = setTimeout(look, EVERY);
        return;
      }
      this.looking = 0;
      this.show("The server is back.");
      this.back();
    };
    this.looking = setTimeout(look, EVERY);
  }
}
