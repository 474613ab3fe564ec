/** Arcs from a token to those it is tied to. */

const SVG = "http://www.w3.org/2000/svg";

/** @typedef {{cell: HTMLElement, nats: number}} Tie */

/**
 * @param {SVGSVGElement} svg lies over the text
 * @param {HTMLElement} from
 * @param {Tie[]} ties
 */
export function drawArcs(svg, from, ties) {
  const origin = svg.getBoundingClientRect();
  const start = top(from, origin);
  svg.replaceChildren(
    ...ties.map(({ cell, nats }) => {
      const path = document.createElementNS(SVG, "path");
      path.setAttribute("d", arc(start, top(cell, origin)));
      path.style.strokeWidth = `${width(nats)}px`;
      path.style.opacity = String(opacity(nats));
      return path;
    }),
  );
}

/** @param {number} nats a full bit is 0.69 */
export function width(nats) {
  return 1 + 3.5 * Math.min(1, nats);
}

/** @param {number} nats */
export function opacity(nats) {
  return 0.2 + 0.65 * Math.min(1, nats / 0.7);
}

/**
 * @param {{x: number, y: number}} a
 * @param {{x: number, y: number}} b
 */
function arc(a, b) {
  const height = 10 + Math.min(44, Math.abs(a.x - b.x) * 0.22 + Math.abs(a.y - b.y) * 0.1);
  const round = (/** @type {number} */ value) => value.toFixed(1);
  return `M${round(a.x)} ${round(a.y)}C${round(a.x)} ${round(a.y - height)} ${round(b.x)} ${round(b.y - height)} ${round(b.x)} ${round(b.y)}`;
}

/**
 * @param {HTMLElement} cell
 * @param {DOMRect} origin
 */
function top(cell, origin) {
  const box = /** @type {Element} */ (cell.querySelector(".ink")).getBoundingClientRect();
  return { x: box.left + box.width / 2 - origin.left, y: box.top - 1 - origin.top };
}
