/**
 * One column's run: what was given, and what each step wrote. Pure: no page, no network.
 *
 * State k is the sequence after k steps; state 0 is what the model was given.
 *
 * @typedef {{prompt_length: number, ids: number[], pieces: (string|null)[], options: any, ahead?: number}} Start
 * @typedef {{number: number, positions: number[], tokens: number[], pieces: string[], scores: number[],
 *            circuit: boolean, window: [number, number], length: number, computed: number, cached: number,
 *            finished: boolean}} Step
 * @typedef {{text: string, steps: number, circuit_steps: number, tokens: number, seconds: number}} Done
 * @typedef {{kind: "given"|"masked"|"written", piece: string|null, score: number|null, step: number|null,
 *            fresh: boolean, active: boolean}} Cell
 */

/** A run in progress or complete. */
export class Run {
  /**
   * @param {Start} start
   * @param {object} [constraint] the field of the request that says what the text must be
   */
  constructor(start, constraint = {}) {
    this.start = start;
    this.constraint = constraint;
    /** @type {Step[]} */
    this.steps = [];
    /** @type {Done|null} */
    this.done = null;
    /** Which steps wrote a position, the later ones by editing it; those that are not in it were given, or are still masked. */
    this.writers = new Map();
  }

  /** @param {Step} step */
  add(step) {
    step.positions.forEach((position, i) => {
      this.writers.set(position, [...(this.writers.get(position) ?? []), { step: this.steps.length, i }]);
    });
    this.steps.push(step);
  }

  /**
   * What wrote the token that state k shows at a position; undefined where nothing has.
   * @param {number} k
   * @param {number} position
   */
  writerAt(k, position) {
    return this.writers.get(position)?.findLast((/** @type {{step: number}} */ writer) => writer.step < k);
  }

  /** How many states there are to see beyond the first. */
  get last() {
    return this.steps.length;
  }

  /** @param {number} k */
  clamp(k) {
    return Math.max(0, Math.min(k, this.last));
  }

  /**
   * The ids of state k, as the model saw them.
   * @param {number} k
   */
  idsAt(k) {
    const ids = this.start.ids.slice(0, this.lengthAt(k));
    for (const step of this.steps.slice(0, k)) {
      step.positions.forEach((position, i) => {
        if (position < ids.length) ids[position] = step.tokens[i];
      });
    }
    return ids;
  }

  /** @param {number} k */
  lengthAt(k) {
    return k > 0 ? this.steps[this.clamp(k) - 1].length : this.start.ids.length;
  }

  /**
   * What to show of every position in state k.
   * @param {number} k
   * @returns {Cell[]}
   */
  cellsAt(k) {
    const window = this.steps[k]?.window ?? null;
    return Array.from({ length: this.lengthAt(k) }, (_, position) => {
      const given = this.start.pieces[position];
      if (given !== null) return cell("given", given);
      const writer = this.writerAt(k, position);
      if (writer === undefined) {
        const active = window !== null && window[0] <= position && position < window[1];
        return { ...cell("masked", null), active };
      }
      const step = this.steps[writer.step];
      return { ...cell("written", step.pieces[writer.i]), score: step.scores[writer.i], step: writer.step, fresh: writer.step === k - 1 };
    });
  }

  /**
   * What a position holds in the end, as far as it is known.
   * @param {number} position
   */
  pieceAt(position) {
    const writer = this.writerAt(this.last, position);
    return writer ? this.steps[writer.step].pieces[writer.i] : this.start.pieces[position];
  }

  /**
   * What to ask the server about a position that state k shows: the sequence just before it was first written, or as it
   * is now if it still is masked. Null where there is nothing to ask.
   * @param {number} k
   * @param {number} position
   */
  question(k, position) {
    if (this.start.pieces[position] !== null) return null;
    const written = this.writerAt(k, position) !== undefined;
    const at = written ? this.writers.get(position)[0].step : this.clamp(k);
    const window = this.windowOf(at, position);
    return window && { state: at, written, window, ids: this.idsAt(at) };
  }

  /**
   * The window that a position belongs to: the next one that holds it, or one guessed from the last when the run has
   * not come so far.
   * @param {number} k
   * @param {number} position
   * @returns {[number, number]|null}
   */
  windowOf(k, position) {
    const next = this.steps.slice(k).find(({ window }) => window[0] <= position && position < window[1]);
    if (next) return next.window;
    const seen = this.steps[Math.min(k, this.last - 1)]?.window ?? [this.start.prompt_length, this.start.prompt_length + this.start.options.block_length];
    const width = seen[1] - seen[0];
    const begin = seen[0] + Math.floor((position - seen[0]) / width) * width;
    const end = Math.min(begin + width, this.lengthAt(k));
    return begin >= 0 && position < end ? [begin, end] : null;
  }

  /** The share of the positions in all calls that the network did not compute; null where that is none. */
  get cachedShare() {
    const [computed, cached] = this.steps.reduce(([a, b], step) => [a + step.computed, b + step.cached], [0, 0]);
    return cached ? cached / (computed + cached) : null;
  }

  /** The numbers below a column. */
  get figures() {
    const calls = this.done?.steps ?? this.last;
    const written = new Set([...this.writers.keys()].filter((position) => position < this.lengthAt(this.last))).size;
    return {
      calls,
      seconds: this.done?.seconds ?? null,
      perCall: calls ? written / calls : null,
      cached: this.cachedShare,
      circuit: this.done?.circuit_steps ?? this.steps.filter((step) => step.circuit).length,
    };
  }
}

/**
 * @param {Cell["kind"]} kind
 * @param {string|null} piece
 * @returns {Cell}
 */
function cell(kind, piece) {
  return { kind, piece, score: null, step: null, fresh: false, active: false };
}

const CONTROL = /^(?:<\|([^|<>]+)\|>|\[(MASK|SEP|CLS|PAD|UNK)\]|<(\/?s|pad|unk|mask)>)$/;

/** @typedef {{text: string, look: "plain"|"gap"|"space"|"line"|"special"|"broken"}} Part */

/**
 * A token's text in parts that can be seen: blanks that would vanish, line ends, control tokens, pieces of characters.
 * @param {string} piece
 * @returns {Part[]}
 */
export function visible(piece) {
  if (piece === "") return [{ text: "∅", look: "special" }];
  const special = CONTROL.exec(piece);
  if (special) return [{ text: special[1] ?? special[2] ?? special[3], look: "special" }];
  if (/^ +$/.test(piece)) return [{ text: piece, look: "space" }];
  /** @type {Part[]} */
  const parts = [];
  for (const text of piece.match(/^ +|\n|\uFFFD+|[^\n\uFFFD]+/g) ?? []) {
    if (text === "\n") parts.push({ text, look: "line" });
    else if (text[0] === "\uFFFD") parts.push({ text, look: "broken" });
    else if (/^ +$/.test(text)) parts.push({ text, look: parts.length ? "plain" : "gap" });
    else parts.push({ text, look: "plain" });
  }
  return parts;
}

/**
 * The same for places where a token is named: one line, blanks shown.
 * @param {string|null} piece
 */
export function named(piece) {
  if (piece === null) return "masked";
  return visible(piece)
    .map(({ text, look }) => (look === "line" ? "↵" : look === "space" ? "␣".repeat(text.length) : look === "broken" ? "◌" : look === "gap" ? "" : text))
    .join("");
}
