/** Asks the server about the token that is pointed at, and shows the answer beside it. */

import { inspect } from "./api.js";
import { drawArcs } from "./arcs.js";
import { el } from "./dom.js";
import { bars, heading, tied, untied } from "./panel.js";
import { cellOf } from "./view.js";

const PATIENCE = 150; // milliseconds that the pointer rests before anything is asked
const LINGER = 220; // and that the panel stays after it has left
const LEAST = 0.005; // nats: less is not worth an arc
const ARCS = 12;
const LISTED = 5;

/** @typedef {import("./view.js").Column} Column */

export class Inspector {
  /**
   * @param {HTMLElement} panel
   * @param {Column[]} columns
   * @param {() => number} candidates how many to ask for
   */
  constructor(panel, columns, candidates) {
    this.panel = panel;
    this.candidates = candidates;
    /** @type {{column: Column, position: number, pinned: boolean}|null} */
    this.target = null;
    /** @type {Map<string, any>} */
    this.answers = new Map();
    /** @type {AbortController|null} */
    this.asking = null;
    this.asked = "";
    this.wait = 0;
    this.leaving = 0;
    columns.forEach((column) => this.#listen(column));
    panel.addEventListener("pointerenter", () => clearTimeout(this.leaving));
    panel.addEventListener("pointerleave", () => this.#leave());
    addEventListener("resize", () => this.refresh());
  }

  get open() {
    return this.target !== null;
  }

  /** A new run: what was asked about the old one is worth nothing. */
  reset() {
    this.answers.clear();
    this.close();
  }

  close() {
    clearTimeout(this.wait);
    clearTimeout(this.leaving);
    this.asking?.abort();
    this.asking = null;
    this.asked = "";
    if (this.target) {
      unmark(this.target.column);
      this.target.column.text.querySelector("[aria-describedby]")?.removeAttribute("aria-describedby");
    }
    this.target = null;
    this.panel.hidden = true;
    document.body.classList.remove("asking");
  }

  /**
   * @param {Column} column
   * @param {number} position
   * @param {boolean} pinned
   */
  point(column, position, pinned) {
    clearTimeout(this.leaving);
    if (this.target?.column === column && this.target.position === position && this.target.pinned === pinned) return;
    if (this.target) unmark(this.target.column);
    this.target = { column, position, pinned };
    this.refresh();
  }

  /** The same token, after the page around it has changed. */
  refresh() {
    if (!this.target) return;
    const { column, position } = this.target;
    const cell = column.cells[position];
    const question = cell && column.run?.question(column.k, position);
    if (!question) return this.close();
    const id = `${column.name} ${question.state} ${question.window}`;
    const answer = this.answers.get(id);
    this.#render(answer ?? null);
    if (answer || this.asked === id) return;
    clearTimeout(this.wait);
    this.asking?.abort();
    this.asked = "";
    this.wait = setTimeout(() => this.#ask(id, question, column), PATIENCE);
  }

  /**
   * @param {string} id
   * @param {{ids: number[], window: [number, number]}} question
   * @param {Column} column
   */
  async #ask(id, { ids, window }, column) {
    const { circuit_temperature, tempering, ban, cfg_scale } = column.run?.start.options ?? {};
    const before = column.run?.start.ids ?? [];
    const written = [...ids.keys()].filter((place) => ids[place] !== before[place]); // not given: guidance sees them
    const asking = new AbortController();
    this.asking = asking;
    this.asked = id;
    try {
      const body = { ids, window, circuit_temperature, tempering, ban, cfg_scale, written, candidates: this.candidates(), ...column.run?.constraint };
      this.answers.set(id, await inspect(body, asking.signal));
    } catch (error) {
      if (asking.signal.aborted) return;
      this.asked = "";
      this.#render(null, /** @type {Error} */ (error).message);
      return;
    }
    this.asked = "";
    this.refresh();
  }

  /**
   * @param {any} answer
   * @param {string} [wrong]
   */
  #render(answer, wrong = "") {
    if (!this.target) return;
    const { column, position } = this.target;
    const run = /** @type {import("./run.js").Run} */ (column.run);
    const cells = run.cellsAt(column.k);
    const { piece, score, step } = cells[position];
    const row = answer ? answer.positions.indexOf(position) : -1;
    const parts = [heading({ piece, position, step, steps: run.last, score })];
    unmark(column);
    column.cells[position].classList.add("marked");
    column.cells[position].setAttribute("aria-describedby", this.panel.id);
    if (row >= 0) {
      const writer = step === null ? null : run.steps[step];
      const chosen = writer && writer.tokens[writer.positions.indexOf(position)];
      const beliefs = { network: answer.network[row], joint: answer.joint[row], network_entropy: answer.network_entropy[row], joint_entropy: answer.joint_entropy[row] };
      const constrained = answer.mutual_information === null;
      const ties = constrained ? [] : strongest(answer, row).filter((tie) => tie.position < cells.length);
      if (answer.aside) parts.push(el("p", "facts", "Here the circuit steps aside: it excludes what is written."));
      const listed = ties.slice(0, LISTED).map((tie) => ({ ...tie, piece: run.pieceAt(tie.position), later: cells[tie.position].kind === "masked", distance: tie.position - position }));
      parts.push(bars(beliefs, chosen, constrained), constrained ? untied() : tied(listed));
      ties.forEach((tie) => column.cells[tie.position].classList.add("tied"));
      drawArcs(column.arcs, column.cells[position], ties.map((tie) => ({ cell: column.cells[tie.position], nats: tie.nats })));
    } else if (wrong) parts.push(el("p", "wrong", wrong));
    else if (answer) parts.push(el("p", "facts", "The circuit's window does not reach this position."));
    else parts.push(el("p", "facts loading", "asking both"));
    const close = el("button", "quiet close", "Close");
    close.type = "button";
    close.addEventListener("click", () => this.close());
    this.panel.replaceChildren(...parts, close);
    this.panel.hidden = false;
    document.body.classList.add("asking"); // a phone gets room to scroll the token above the sheet
    place(this.panel, column, column.cells[position]);
  }

  /** @param {Column} column */
  #listen(column) {
    const position = (/** @type {Event} */ event) => {
      const cell = cellOf(event.target);
      return cell && !cell.classList.contains("given") ? Number(cell.dataset.position) : null;
    };
    column.text.addEventListener("pointerover", (event) => {
      const at = position(event);
      if (event.pointerType === "touch" || this.target?.pinned) return;
      if (at === null) this.#leave();
      else this.point(column, at, false);
    });
    column.text.addEventListener("pointerleave", () => this.#leave());
    column.text.addEventListener("focusin", (event) => {
      const at = position(event);
      if (at !== null && cellOf(event.target)?.matches(":focus-visible")) this.point(column, at, this.target?.pinned ?? false);
    });
    column.text.addEventListener("focusout", () => this.#leave());
    column.text.addEventListener("click", (event) => {
      const at = position(event);
      if (at !== null) this.#pin(column, at);
    });
    column.text.addEventListener("keydown", (event) => {
      const at = position(event);
      if (at === null || !["Enter", " "].includes(event.key) || event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      this.#pin(column, at);
    });
  }

  /**
   * A pinned token stays until it is pressed again, or something else is.
   * @param {Column} column
   * @param {number} position
   */
  #pin(column, position) {
    const again = this.target?.column === column && this.target.position === position && this.target.pinned;
    if (again) this.close();
    else this.point(column, position, true);
  }

  #leave() {
    if (this.target?.pinned) return;
    clearTimeout(this.leaving);
    this.leaving = setTimeout(() => this.close(), LINGER);
  }
}

/**
 * The positions that share most information with that of a row, strongest first.
 * @param {{positions: number[], mutual_information: number[][]}} answer
 * @param {number} row
 */
export function strongest({ positions, mutual_information: nats }, row) {
  return nats[row]
    .map((value, i) => ({ position: positions[i], nats: value }))
    .filter((tie, i) => i !== row && tie.nats >= LEAST)
    .sort((a, b) => b.nats - a.nats)
    .slice(0, ARCS);
}

/** @param {Column} column */
function unmark(column) {
  for (const cell of column.text.querySelectorAll(".marked, .tied")) cell.classList.remove("marked", "tied");
  column.arcs.replaceChildren();
}

/**
 * Beside the text rather than over it: the arcs are there. On a phone the style sheet puts it at the bottom.
 * @param {HTMLElement} panel
 * @param {Column} column
 * @param {HTMLElement} cell
 */
function place(panel, column, cell) {
  panel.style.left = panel.style.top = "";
  if (getComputedStyle(panel).position === "fixed") return keepVisible(panel, cell);
  const within = /** @type {Element} */ (panel.offsetParent).getBoundingClientRect();
  const [box, sheet, token, size] = [column.root, column.sheet, cell, panel].map((each) => each.getBoundingClientRect());
  const below = sheet.bottom + 4;
  const middle = token.left + token.width / 2 - size.width / 2;
  let left = Math.max(box.left, Math.min(middle, box.right - size.width));
  let top = below;
  if (below + size.height > innerHeight && innerHeight > size.height) {
    left = box.right + 8 + size.width <= innerWidth ? box.right + 8 : Math.max(8, box.left - 8 - size.width);
    top = Math.max(8, Math.min(token.top - 40, innerHeight - size.height - 8));
  }
  panel.style.left = `${left - within.left}px`;
  panel.style.top = `${top - within.top}px`;
}

/**
 * @param {HTMLElement} panel
 * @param {HTMLElement} cell
 */
function keepVisible(panel, cell) {
  const hidden = cell.getBoundingClientRect().bottom + 24 - panel.getBoundingClientRect().top;
  if (hidden > 0) scrollBy({ top: hidden });
}
