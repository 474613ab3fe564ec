/** The field for structured output, which the server checks while it is typed. */

import { Problem, compile } from "./api.js";
import { byId } from "./dom.js";
import { field, toConstraint } from "./settings.js";

const PATIENCE = 400; // milliseconds without a change before anything is asked

/** @type {Record<string, string>} */
const LABELS = {
  guided_regex: "Regular expression that the whole text matches",
  guided_json: "JSON schema of the text",
  guided_choice: "Texts to choose from, one a line",
};

export class ConstraintField {
  /** @param {HTMLFormElement} form */
  constructor(form) {
    this.input = field(form, "pattern");
    /** What was asked about last, so that changes elsewhere in the form ask nothing. */
    this.asked = "{}";
    this.wait = 0;
    /** @type {AbortController|null} */
    this.asking = null;
  }

  /**
   * The form has changed.
   * @param {import("./settings.js").Settings} settings
   */
  refresh(settings) {
    byId("pattern-field").hidden = settings.constraint === "";
    byId("pattern-label").textContent = LABELS[settings.constraint] ?? "";
    const constraint = toConstraint(settings);
    const asked = JSON.stringify(constraint);
    if (asked === this.asked) return;
    this.asked = asked;
    clearTimeout(this.wait);
    this.asking?.abort();
    if (asked === "{}") this.#say("");
    else this.wait = setTimeout(() => this.#check(constraint), PATIENCE);
  }

  /** @param {object} constraint */
  async #check(constraint) {
    const asking = new AbortController();
    this.asking = asking;
    this.#say("Checking …");
    try {
      const { states, shortest } = await compile(constraint, asking.signal);
      this.#say(`Can be followed: ${count(states, "state")}, and the shortest text has ${count(shortest, "token")}.`);
    } catch (error) {
      if (asking.signal.aborted) return;
      if (!(error instanceof Problem)) throw error;
      if (error.kind === "rejected") return this.#say(error.message, true);
      this.asked = ""; // to be asked again
      this.#say(`Not checked: ${error.message}`);
    }
  }

  /**
   * @param {string} words
   * @param {boolean} [wrong]
   */
  #say(words, wrong = false) {
    byId("pattern-state").textContent = words;
    byId("pattern-state").classList.toggle("wrong", wrong);
    if (wrong) this.input.setAttribute("aria-invalid", "true");
    else this.input.removeAttribute("aria-invalid");
  }
}

/**
 * @param {number} number
 * @param {string} name
 */
function count(number, name) {
  return `${number} ${name}${number === 1 ? "" : "s"}`;
}
