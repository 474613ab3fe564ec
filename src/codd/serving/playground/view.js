/** A column: one run's text, position by position, and the numbers below it. */

import { el, percent } from "./dom.js";
import { named, visible } from "./run.js";

/** @typedef {import("./run.js").Run} Run @typedef {import("./run.js").Cell} Cell */

export class Column {
  /**
   * @param {HTMLElement} root
   * @param {string} name
   */
  constructor(root, name) {
    this.root = root;
    this.name = name;
    this.sheet = /** @type {HTMLElement} */ (root.querySelector(".sheet"));
    this.text = /** @type {HTMLElement} */ (root.querySelector(".text"));
    this.arcs = /** @type {SVGSVGElement} */ (root.querySelector(".arcs"));
    this.state = /** @type {HTMLElement} */ (root.querySelector(".state"));
    this.figures = /** @type {HTMLElement} */ (root.querySelector(".figures"));
    /** @type {Run|null} */
    this.run = null;
    this.k = 0;
    /** @type {HTMLElement[]} */
    this.cells = [];
    /** What each cell shows, so that only those that changed are touched and focus stays where it is. */
    /** @type {string[]} */
    this.shown = [];
    this.#figures();
    this.text.addEventListener("keydown", (event) => this.#walk(event));
    this.text.addEventListener("focusin", (event) => this.#rove(cellOf(event.target)));
  }

  clear() {
    this.run = null;
    this.text.replaceChildren();
    this.#figures();
    this.cells = [];
    this.shown = [];
  }

  /**
   * What a run would begin with, before there is any.
   * @param {(string|null)[]} pieces
   */
  preview(pieces) {
    if (this.run) return;
    this.text.replaceChildren(...pieces.map((piece) => (piece === null ? el("span", "cell masked", el("span", "ink")) : el("span", "cell given", piece))));
  }

  /** @param {Run} run */
  begin(run) {
    this.clear();
    this.run = run;
    this.show(0);
  }

  /**
   * Show the state after k steps, or the last there is.
   * @param {number} k
   */
  show(k) {
    if (!this.run) return;
    this.k = this.run.clamp(k);
    const wanted = this.run.cellsAt(this.k);
    while (this.cells.length > wanted.length) this.cells.pop()?.remove();
    wanted.forEach((cell, position) => this.#paint(cell, position));
    this.shown.length = wanted.length;
    if (!this.text.querySelector(".cell[tabindex='0']")) this.#rove(this.pointable()[0] ?? null);
    this.#figures();
  }

  /**
   * @param {string} words
   * @param {"idle"|"busy"|"done"|"wrong"} look
   */
  say(words, look) {
    this.state.textContent = words;
    this.state.className = `state ${look}`;
    this.root.setAttribute("aria-busy", String(look === "busy"));
  }

  /** The cells that can be asked about. */
  pointable() {
    return this.cells.filter((cell) => !cell.classList.contains("given"));
  }

  /**
   * @param {Cell} cell
   * @param {number} position
   */
  #paint(cell, position) {
    const look = JSON.stringify(cell);
    if (this.shown[position] === look) return;
    this.shown[position] = look;
    if (!this.cells[position]) {
      this.cells[position] = el("span");
      this.cells[position].dataset.position = String(position);
      this.text.append(this.cells[position]);
    }
    const element = this.cells[position];
    const marked = element.classList.contains("marked") ? " marked" : "";
    element.className = `cell ${cell.kind}${cell.fresh ? " fresh" : ""}${cell.active ? " active" : ""}${marked}`;
    element.replaceChildren(...(cell.piece === null ? [el("span", "ink")] : drawn(cell.piece, cell.kind === "given")));
    if (cell.kind === "given") {
      // An answer to a question starts on its own line; a continuation does not.
      if (position === (this.run?.start.prompt_length ?? 0) - 1 && element.querySelector(".special")) element.append("\n");
      return;
    }
    element.setAttribute("role", "button");
    if (!element.hasAttribute("tabindex")) element.tabIndex = -1;
    element.setAttribute("aria-label", described(cell, position));
    element.style.setProperty("--sure", String(cell.score ?? 0));
  }

  #figures() {
    const { calls, seconds, perCall, circuit, cached } = this.run?.figures ?? {};
    const rows = [
      ["network calls", calls?.toString()],
      ["seconds", seconds?.toFixed(2)],
      ["tokens per call", perCall?.toFixed(1)],
      ["circuit steps", circuit?.toString()],
      ...(cached ? [["from the cache", `${Math.round(100 * cached)}%`]] : []),
    ];
    this.figures.replaceChildren(...rows.map(([name, value]) => el("div", "", el("dt", "", name), el("dd", "", value ?? "–"))));
  }

  /**
   * One cell at a time is in the tab order.
   * @param {HTMLElement|null} cell
   */
  #rove(cell) {
    if (!cell || cell.classList.contains("given")) return;
    for (const other of this.text.querySelectorAll(".cell[tabindex='0']")) other.setAttribute("tabindex", "-1");
    cell.tabIndex = 0;
  }

  /** @param {KeyboardEvent} event */
  #walk(event) {
    const from = cellOf(event.target);
    if (!from || event.altKey || event.ctrlKey || event.metaKey) return;
    const all = this.pointable();
    const at = all.indexOf(from);
    const to = {
      ArrowLeft: () => all[at - 1],
      ArrowRight: () => all[at + 1],
      Home: () => all[0],
      End: () => all[all.length - 1],
      ArrowUp: () => nextLine(all, from, -1),
      ArrowDown: () => nextLine(all, from, 1),
    }[event.key];
    if (!to) return;
    event.preventDefault();
    event.stopPropagation(); // outside the text these keys go through the steps
    to()?.focus();
  }
}

/**
 * @param {EventTarget|null} target
 * @returns {HTMLElement|null}
 */
export function cellOf(target) {
  return target instanceof Element ? target.closest(".cell") : null;
}

/**
 * A token's text as elements; of what the model wrote, blanks and line ends are visible.
 * @param {string} piece
 * @param {boolean} given
 * @returns {Node[]}
 */
function drawn(piece, given) {
  const ink = el("span", "ink");
  /** @type {{before: string, after: string}} outside of the coloured ground, so that lines break there */
  const around = { before: "", after: "" };
  for (const { text, look } of visible(piece)) {
    const plain = look === "plain" || (given && look !== "special" && look !== "broken");
    if (look === "gap") around.before += text;
    else if (plain) ink.append(text);
    else ink.append(mark(text, look));
    if (look === "line" && !given) around.after += text;
  }
  return [document.createTextNode(around.before), ink, document.createTextNode(around.after)];
}

/**
 * @param {string} text
 * @param {string} look
 */
function mark(text, look) {
  const shown = { broken: "◌", line: "↵", space: "·".repeat(text.length) }[look] ?? text;
  const made = el("span", look, shown);
  if (look === "broken") made.title = "part of a character: its other tokens hold the rest";
  return made;
}

/**
 * @param {Cell} cell
 * @param {number} position
 */
function described(cell, position) {
  if (cell.kind === "masked") return `masked, position ${position}`;
  return `${named(cell.piece)}, step ${(cell.step ?? 0) + 1}, ${percent(cell.score ?? 0)}`;
}

/**
 * The cell that is nearest on the line above or below.
 * @param {HTMLElement[]} all
 * @param {HTMLElement} from
 * @param {number} direction
 */
function nextLine(all, from, direction) {
  const here = middle(from);
  const beyond = all.map((cell) => ({ cell, at: middle(cell) })).filter(({ at }) => (at.y - here.y) * direction > 8);
  const line = Math.min(...beyond.map(({ at }) => (at.y - here.y) * direction));
  const near = beyond.filter(({ at }) => (at.y - here.y) * direction < line + 8);
  near.sort((a, b) => Math.abs(a.at.x - here.x) - Math.abs(b.at.x - here.x));
  return near[0]?.cell;
}

/** @param {HTMLElement} cell */
function middle(cell) {
  const box = /** @type {Element} */ (cell.querySelector(".ink")).getBoundingClientRect();
  return { x: box.left + box.width / 2, y: box.top + box.height / 2 };
}
