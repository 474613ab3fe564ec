/** What the panel says of a token: its candidates under the network alone and under the joint, and its ties. */

import { el, percent } from "./dom.js";
import { named, visible } from "./run.js";

const ROWS = 5;
const SEEN = 0.001; // a bar of less is no bar

/**
 * @typedef {{token: number, piece: string, probability: number, allowed: boolean}} Candidate `allowed` by the constraint, if any
 * @typedef {{network: Candidate[], joint: Candidate[], network_entropy: number, joint_entropy: number}} Beliefs
 * @typedef {{piece: string|null, later: boolean, distance: number, nats: number}} Named `later`: still masked there
 */

/**
 * Both lists as one: the tokens that either thinks most probable. A token that is not in a list is at most as probable
 * as the last one there.
 * @param {Candidate[]} network
 * @param {Candidate[]} joint
 * @param {number|null} chosen is always in it, if any list has it
 */
export function paired(network, joint, chosen) {
  const rows = new Map();
  for (const [side, list] of /** @type {[string, Candidate[]][]} */ ([["network", network], ["joint", joint]])) {
    for (const { token, piece, probability, allowed } of list) {
      if (!rows.has(token)) rows.set(token, { token, piece, allowed, network: null, joint: null });
      rows.get(token)[side] = probability;
    }
  }
  const weight = (/** @type {any} */ row) => Math.max(row.network ?? 0, row.joint ?? 0);
  const sorted = [...rows.values()].sort((a, b) => weight(b) - weight(a));
  const kept = sorted.slice(0, ROWS).filter((row, i) => i < 2 || weight(row) >= SEEN);
  const own = sorted.find((row) => row.token === chosen);
  if (own && !kept.includes(own)) kept.splice(ROWS - 1, 1, own);
  return kept;
}

/**
 * @param {{piece: string|null, position: number, step: number|null, steps: number, score: number|null}} token
 * @returns {HTMLElement}
 */
export function heading({ piece, position, step, steps, score }) {
  const title = el("h3", "panel-title", piece === null ? el("span", "sample masked") : label(piece));
  const facts = step === null ? `still masked · position ${position}` : `step ${step + 1} of ${steps} · position ${position}`;
  const line = el("p", "facts", facts);
  if (score !== null) line.append(" · ", el("strong", "", percent(score)));
  return el("header", "panel-head", title, line);
}

/**
 * @param {Beliefs} beliefs
 * @param {number|null} chosen
 * @param {boolean} constrained
 * @returns {HTMLElement}
 */
export function bars(beliefs, chosen, constrained) {
  const [alone, joint] = constrained ? ["network alone, free", "joint, with circuit and constraint"] : ["network alone", "joint, with the circuit"];
  const key = el("p", "bar-key", el("span", "swatch network"), alone, el("span", "swatch joint"), joint);
  const list = el("ul", "bars");
  const least = { network: beliefs.network.at(-1)?.probability ?? 0, joint: beliefs.joint.at(-1)?.probability ?? 0 };
  const rows = paired(beliefs.network, beliefs.joint, chosen);
  for (const row of rows) {
    const item = el("li", row.token === chosen ? "chosen" : row.allowed ? "" : "excluded", el("span", "candidate", label(row.piece)));
    if (row.token === chosen) item.append(el("span", "sr", "chosen"));
    item.append(bar("network", row.network, least.network), row.allowed ? bar("joint", row.joint, least.joint) : excluded());
    list.append(item);
  }
  const nats = `uncertainty ${beliefs.network_entropy.toFixed(2)} nats alone, ${beliefs.joint_entropy.toFixed(2)} in the joint`;
  const legend = rows.every((row) => row.allowed) ? [] : [el("p", "facts", el("s", "", "struck through"), ": the constraint excludes it here")];
  return el("div", "beliefs", key, list, ...legend, el("p", "facts", nats));
}

/**
 * @param {Named[]} ties
 * @returns {HTMLElement}
 */
export function tied(ties) {
  if (!ties.length) return el("p", "ties facts", "Not coupled to any other masked position of its window.");
  const list = el("ul", "ties-list");
  for (const { piece, later, distance, nats } of ties) {
    const where = `${Math.abs(distance)} ${distance < 0 ? "before" : "after"}`;
    const name = piece === null ? el("span", "facts", `masked, ${where}`) : label(piece);
    const item = el("li", later ? "later" : "", name, " ", el("span", "number", nats.toFixed(2)));
    item.title = `${named(piece)}${later ? ", still masked in this step" : ""}, ${where}: ${nats.toFixed(3)} nats of mutual information`;
    list.append(item);
  }
  return el("div", "ties", el("p", "facts", "coupled to (nats)"), list);
}

/** In place of the ties, which the server does not compute under a constraint. */
export function untied() {
  return el("p", "ties facts", "Couplings are not computed under a constraint: too costly.");
}

/**
 * A token's name; a blank before it is seen, because it makes another token.
 * @param {string} piece
 */
export function label(piece) {
  const made = el("code", "token");
  for (const { text, look } of visible(piece)) {
    if (look === "space") made.append("␣".repeat(text.length));
    else if (look === "gap") made.append(el("span", "blank", "␣".repeat(text.length)));
    else made.append(look === "line" ? "↵" : look === "broken" ? "◌" : text);
  }
  return made;
}

/**
 * @param {"network"|"joint"} side
 * @param {number|null} probability
 * @param {number} least
 */
function bar(side, probability, least) {
  const fill = el("span", "fill");
  fill.style.width = `${100 * (probability ?? 0)}%`;
  const words = probability === null ? `<${percent(least).replace(/^</, "")}` : percent(probability);
  return el("span", `bar ${side}`, el("span", "track", fill), el("span", "number", words));
}

/** In place of the joint's bar: the token is impossible. */
function excluded() {
  return el("span", "bar joint", el("span", "track"), el("span", "number", "excluded"));
}
