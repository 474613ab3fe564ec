/** Back and forth through the steps of both columns at once. */

import { byId } from "./dom.js";

const PACE = 650; // milliseconds a step

export class Player {
  /** @param {(k: number) => void} changed */
  constructor(changed) {
    this.changed = changed;
    this.k = 0;
    this.max = 0;
    this.timer = 0;
    this.slider = /** @type {HTMLInputElement} */ (byId("slider"));
    this.slider.addEventListener("input", () => this.#by(Number(this.slider.value) - this.k));
    byId("back").addEventListener("click", () => this.#by(-1));
    byId("forward").addEventListener("click", () => this.#by(1));
    byId("play").addEventListener("click", () => this.toggle());
    document.addEventListener("keydown", (event) => this.#key(event));
    this.#draw();
  }

  /** A new run: nothing to see yet. */
  reset() {
    this.#pause();
    this.k = 0;
    this.max = 0;
    this.#draw();
  }

  /**
   * There are more steps; whoever was at the end stays at the end.
   * @param {number} max
   */
  extend(max) {
    const following = this.k === this.max && !this.timer;
    this.max = Math.max(this.max, max);
    if (following) this.k = this.max;
    this.#draw();
    this.changed(this.k);
  }

  /** @param {number} k */
  go(k) {
    const to = Math.max(0, Math.min(k, this.max));
    if (to === this.k) return;
    this.k = to;
    this.#draw();
    this.changed(to);
  }

  toggle() {
    if (this.timer) return this.#pause();
    if (!this.max) return;
    if (this.k === this.max) this.go(0);
    this.timer = setInterval(() => (this.k < this.max ? this.go(this.k + 1) : this.#pause()), PACE);
    this.#draw();
  }

  #pause() {
    clearInterval(this.timer);
    this.timer = 0;
    this.#draw();
  }

  /** @param {number} steps moved by hand: what plays by itself stops */
  #by(steps) {
    this.#pause();
    this.go(this.k + steps);
  }

  /** @param {KeyboardEvent} event */
  #key(event) {
    if (!this.max || event.altKey || event.ctrlKey || event.metaKey || event.defaultPrevented) return;
    const target = /** @type {Element} */ (event.target);
    if (target.closest("input, textarea, select")) return; // the slider has these keys of its own
    const onToken = target.closest(".text") !== null;
    const action = {
      ArrowLeft: () => this.#by(-1),
      ArrowRight: () => this.#by(1),
      Home: () => this.#by(-this.max),
      End: () => this.#by(this.max),
      ",": () => this.#by(-1),
      ".": () => this.#by(1),
      " ": target.closest("button, summary, a, [role=button]") ? undefined : () => this.toggle(),
    }[event.key];
    if (!action || (onToken && ![",", "."].includes(event.key))) return;
    event.preventDefault();
    action();
  }

  #draw() {
    const none = this.max === 0;
    this.slider.max = String(this.max);
    this.slider.value = String(this.k);
    this.slider.disabled = none;
    this.slider.setAttribute("aria-valuetext", `step ${this.k} of ${this.max}`);
    this.slider.style.setProperty("--done", `${none ? 0 : (100 * this.k) / this.max}%`);
    byId("play").disabled = none;
    byId("back").disabled = none || this.k === 0;
    byId("forward").disabled = none || this.k === this.max;
    byId("play").classList.toggle("playing", this.timer !== 0);
    byId("play").setAttribute("aria-label", this.timer ? "Pause" : "Play");
    byId("where").textContent = none ? "" : `step ${this.k} of ${this.max}`;
  }
}
