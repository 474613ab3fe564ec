/** Two runs of one prompt, side by side: the network alone, and with the circuit. */

import { Problem, denoise, models } from "./api.js";
import { ConstraintField } from "./constraint.js";
import { byId, calm, el } from "./dom.js";
import { Inspector } from "./inspect.js";
import { Notices } from "./notices.js";
import { Player } from "./player.js";
import { Run } from "./run.js";
import { EXAMPLES, FIRST, field, fromHash, pace, preview, readForm, toConstraint, toHash, toRequest, writeForm } from "./settings.js";
import { Column } from "./view.js";

const CANDIDATES = 8;

const form = /** @type {HTMLFormElement} */ (byId("form"));
const left = new Column(byId("left"), "Network alone");
const right = new Column(byId("right"), "With the circuit");
const columns = [left, right];
const inspector = new Inspector(byId("panel"), columns, () => CANDIDATES);
const constraintField = new ConstraintField(form);
const player = new Player((k) => {
  columns.forEach((column) => column.show(k));
  inspector.refresh();
});
const notices = new Notices({ back: connect, again: () => connect().then(() => waiting && go()) });

/** @type {any} */
let model = null;
/** @type {AbortController|null} */
let running = null;
let waiting = false; // a run was asked for and refused for want of a key

/** Run what the form says, and put it into the address. */
async function go() {
  running?.abort();
  const mine = new AbortController();
  running = mine;
  waiting = false;
  const settings = readForm(form);
  history.replaceState(null, "", toHash(settings));
  notices.clear();
  unmarkFields();
  inspector.reset();
  showRunning(true);
  byId("copy").disabled = false;
  announce("Running.");
  const fresh = { begun: false, constraint: toConstraint(settings) }; // what is shown stays until the first of the two has something else
  await Promise.all([follow(left, toRequest(settings, "factorized"), mine, fresh), follow(right, toRequest(settings, settings.sampler), mine, fresh)]);
  if (running !== mine) return;
  running = null;
  showRunning(false);
}

/**
 * One column's run, asked for again while the server is busy.
 * @param {Column} column
 * @param {object} body
 * @param {AbortController} mine
 * @param {{begun: boolean, constraint: object}} fresh
 */
async function follow(column, body, mine, fresh) {
  column.say("asking", "busy");
  for (;;) {
    try {
      for await (const { event, data } of denoise(body, mine.signal)) take(column, event, data, fresh);
      return;
    } catch (error) {
      if (mine.signal.aborted) return column.say(...ended(mine.signal));
      if (!(error instanceof Problem)) throw error;
      if (error.kind !== "busy") return refuse(column, error, mine);
      await pause(column, error.retryAfter || 2, mine.signal);
    }
  }
}

/**
 * @param {Column} column
 * @param {string} event
 * @param {any} data
 * @param {{begun: boolean, constraint: object}} fresh
 */
function take(column, event, data, fresh) {
  if (event === "start") {
    if (!fresh.begun) {
      fresh.begun = true;
      columns.forEach((each) => each.clear());
      player.reset();
      if (byId("notice").hidden === false) notices.clear();
      byId("results").classList.add("begun");
      byId("left-constraint").hidden = !Object.keys(fresh.constraint).length;
      if (matchMedia("(max-width: 860px)").matches) byId("results").scrollIntoView({ behavior: calm() ? "auto" : "smooth" });
    }
    column.begin(new Run(data, fresh.constraint));
    column.say(data.ahead ? `waiting, ${data.ahead} ahead` : "running", "busy");
  } else if (event === "step" && column.run) {
    column.run.add(data);
    column.say(`step ${column.run.last}`, "busy");
    player.extend(column.run.last);
  } else if (event === "done" && column.run) {
    column.run.done = data;
    column.show(player.k);
    column.say("done", "done");
    announce(`${column.name}: done after ${data.steps} network calls in ${data.seconds.toFixed(1)} seconds.`);
  }
}

/**
 * @param {Column} column
 * @param {Problem} problem
 * @param {AbortController} mine
 */
function refuse(column, problem, mine) {
  mine.abort(problem); // what one column is refused the other is, too
  waiting = problem.kind === "key";
  column.say(...ended(mine.signal));
  notices.report(problem);
  if (problem.kind === "rejected" && problem.param) markField(problem.param);
}

/**
 * What a column says of a run that was ended.
 * @param {AbortSignal} signal
 * @returns {[string, "idle"|"wrong"]}
 */
function ended({ reason }) {
  if (!(reason instanceof Problem)) return ["stopped", "idle"];
  /** @type {Record<string, string>} */
  const words = { gone: "no answer", closing: "no answer", deadline: "out of time", failed: "failed" };
  return [words[reason.kind] ?? "refused", "wrong"];
}

/**
 * @param {Column} column
 * @param {number} seconds
 * @param {AbortSignal} signal
 */
async function pause(column, seconds, signal) {
  for (let rest = Math.ceil(seconds); rest > 0 && !signal.aborted; rest--) {
    column.say(`busy, again in ${rest} s`, "busy");
    notices.show(`The server is busy, trying again in ${rest} s. Stop ends the wait.`);
    await new Promise((resolve) => {
      const timer = setTimeout(resolve, 1000);
      signal.addEventListener("abort", () => (clearTimeout(timer), resolve(null)), { once: true });
    });
  }
  notices.clear();
}

/** @param {string} param may name an item of a field: "prompt.0", "body.steps" */
function markField(param) {
  const parts = param.split(/[.[]/).map((part) => (part.startsWith("guided_") ? "pattern" : part));
  const name = parts.find((part) => part in FIRST);
  const input = name && field(form, name);
  if (!input) return;
  input.setAttribute("aria-invalid", "true");
  input.setAttribute("aria-errormessage", "notice-text");
  const more = input.closest("details");
  if (more) more.open = true;
  input.focus();
}

function unmarkFields() {
  for (const input of form.querySelectorAll("[aria-invalid]")) {
    input.removeAttribute("aria-invalid");
    input.removeAttribute("aria-errormessage");
  }
}

function stop() {
  running?.abort();
  notices.clear();
  announce("Stopped.");
}

/** @param {boolean} on */
function showRunning(on) {
  byId("stop").hidden = !on;
  byId("results").classList.toggle("running", on);
}

/** @param {string} words */
function announce(words) {
  byId("status").textContent = words;
}

/** What the server serves; the page can be read before it is known, and runs without it. */
async function connect() {
  try {
    [model] = await models();
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    byId("model").textContent = "no server";
    notices.report(error);
    return;
  }
  const circuit = model.circuit;
  const states = circuit?.states ? ` of ${circuit.states.toLocaleString("en")} states` : "";
  const window = circuit?.window ? ` over ${circuit.window} tokens` : "";
  byId("model").replaceChildren(el("strong", "", model.id), circuit ? ` with a circuit${states}${window}` : " without a circuit");
  if (circuit?.modulated) byId("model").title = "The network modulates the circuit.";
  if (!circuit) byId("right-about").textContent = "This server has no circuit: both columns are the network alone.";
  byId("mask").hidden = !model.mask_token;
  byId("about").hidden = !model.about;
  byId("about").textContent = model.about ?? "";
  writeForm(form, readForm(form), model.defaults);
  showPace();
}

function showPace() {
  const limit = model?.max_length ? `, up to ${model.max_length} tokens with the prompt` : "";
  const settings = readForm(form);
  constraintField.refresh(settings);
  const given = /** @type {const} */ ([settings, model?.defaults ?? {}, model?.mask_token ?? null]);
  byId("pace").textContent = pace(...given) + limit;
  columns.forEach((column) => column.preview(preview(...given)));
}

function insertMask() {
  const prompt = /** @type {HTMLTextAreaElement} */ (field(form, "prompt"));
  prompt.setRangeText(model.mask_token, prompt.selectionStart, prompt.selectionEnd, "end");
  prompt.focus();
  showPace();
}

/** @param {import("./settings.js").Example} example */
function fill({ prompt, changes }) {
  const mask = model?.mask_token ?? "<|mask|>";
  writeForm(form, { ...FIRST, ...changes, prompt: prompt.replaceAll("{mask}", mask) }, model?.defaults ?? {});
  showPace();
  go();
}

async function copyLink() {
  const button = byId("copy");
  try {
    await navigator.clipboard.writeText(location.href);
    button.textContent = "Copied";
    announce("The link is copied.");
  } catch {
    button.textContent = "Copy it from the address bar";
  }
  setTimeout(() => (button.textContent = "Copy link"), 2000);
}

function toggleTheme() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  localStorage.setItem("codd.theme", root.dataset.theme);
}

/** Whether the address says what to run. */
function openLink() {
  const linked = fromHash(location.hash);
  writeForm(form, linked ?? FIRST, model?.defaults ?? {});
  byId("more").open = linked !== null && ["remasking", "mode", "block_length", "temperature", "seed", "cache", "chat"].some((name) => linked[name] !== "");
  showPace();
  return linked !== null;
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  go();
});
form.addEventListener("input", showPace);
byId("stop").addEventListener("click", stop);
byId("mask").addEventListener("click", insertMask);
byId("copy").addEventListener("click", copyLink);
byId("theme").addEventListener("click", toggleTheme);
byId("skip").addEventListener("click", (/** @type {Event} */ event) => {
  event.preventDefault(); // the address holds the run, and is not for anchors
  field(form, "prompt").focus();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    go();
  } else if (event.key === "Escape") {
    if (inspector.open) inspector.close();
    else if (running) stop();
  }
});
addEventListener("hashchange", () => openLink() && go());

byId("examples").append(
  ...EXAMPLES.map((example) => {
    const button = el("button", "chip", example.title);
    button.type = "button";
    button.addEventListener("click", () => fill(example));
    return button;
  }),
);
if (/Mac|iPhone|iPad/.test(navigator.platform)) byId("run-key").textContent = "⌘ ⏎";
const linked = openLink();
await connect();
if (linked) go();
