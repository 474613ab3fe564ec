/** Elements made from text. There is no way here to insert markup, and there must be none. */

/**
 * @template {keyof HTMLElementTagNameMap} T
 * @param {T} tag
 * @param {string} name the class
 * @param {...(Node|string)} children text becomes text nodes
 * @returns {HTMLElementTagNameMap[T]}
 */
export function el(tag, name = "", ...children) {
  const made = document.createElement(tag);
  if (name) made.className = name;
  made.append(...children);
  return made;
}

/**
 * @param {string} id
 * @returns {any}
 */
export function byId(id) {
  return document.getElementById(id);
}

/** Whether the page should hold still. */
export const calm = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

/** @param {number} probability */
export function percent(probability) {
  const value = probability * 100;
  if (value > 0 && value < 0.1) return "<0.1%";
  if (value < 100 && value >= 99.95) return ">99.9%";
  return `${value >= 100 ? 100 : value.toFixed(1)}%`;
}
