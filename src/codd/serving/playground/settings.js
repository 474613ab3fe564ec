/** The form's values, the link that holds them, and the request that is made of them. */

/** @typedef {Record<string, string>} Settings what the fields say, as text; "" where nothing was said */

/** A first visit: everything but the prompt is as the server does it where nothing is said. */
export const FIRST = Object.freeze({
  prompt: "A group of hikers takes 98 ounces of trail mix. They divide it into 7 equal bags. Adam takes one of these bags and eats 7 ounces out of it. How many ounces are left in this bag?",
  steps: "",
  threshold: "",
  gen_length: "",
  sampler: "",
  mode: "",
  remasking: "",
  block_length: "",
  temperature: "",
  seed: "",
  cache: "",
  chat: "",
  constraint: "",
  pattern: "",
});

const NUMBERS = ["steps", "threshold", "gen_length", "block_length", "temperature", "seed"];

/** @typedef {{title: string, prompt: string, changes?: Settings}} Example `{mask}` stands for the model's mask */

/** @type {Example[]} */
export const EXAMPLES = [
  { title: "Trail mix", prompt: FIRST.prompt },
  {
    title: "Masks in 2 calls",
    prompt: `They walked${"{mask}".repeat(5)} the river, and in the evening${"{mask}".repeat(6)} the fire.`,
    changes: { gen_length: "0", steps: "2", temperature: "1", seed: "0" },
  },
  {
    title: "Prose in 8 calls",
    prompt: "It was a cold night in November. The two men walked slowly along the river without speaking, until at last",
    changes: { chat: "off", gen_length: "128", steps: "8", temperature: "1", seed: "0" },
  },
  {
    title: "A problem in 16 steps",
    prompt: "Workers load a truck with 2 sacks of 57 pounds each and 3 tables of 50 pounds each. How many pounds are on the truck at the end?",
    changes: { gen_length: "128", steps: "16" },
  },
  {
    title: "By a pattern",
    prompt: FIRST.prompt,
    changes: { constraint: "guided_regex", pattern: String.raw`([^\n]+\n){2}There are \d+ ounces left in the bag\.` },
  },
];

/**
 * @param {HTMLFormElement} form
 * @returns {Settings}
 */
export function readForm(form) {
  /** @type {Settings} */
  const found = {};
  for (const name of Object.keys(FIRST)) found[name] = field(form, name).value;
  return found;
}

/**
 * What is empty is left to the server, and shows what it will do.
 * @param {HTMLFormElement} form
 * @param {Settings} settings
 * @param {Record<string, unknown>} defaults the server's
 */
export function writeForm(form, settings, defaults) {
  for (const name of Object.keys(FIRST)) {
    const input = field(form, name);
    const usual = String(defaults[name] ?? "");
    input.value = settings[name] ?? "";
    if (input instanceof HTMLInputElement) input.placeholder = usual || "none";
    // Also where a link names an order of another server.
    if (input instanceof HTMLSelectElement && input.selectedIndex < 0) input.value = usual;
  }
}

/**
 * @param {HTMLFormElement} form
 * @param {string} name
 * @returns {HTMLInputElement|HTMLTextAreaElement|HTMLSelectElement}
 */
export function field(form, name) {
  return /** @type {any} */ (form.elements.namedItem(name));
}

/** @param {Settings} settings */
export function toHash(settings) {
  return `#${new URLSearchParams(Object.entries(settings).filter(([, value]) => value !== ""))}`;
}

/**
 * What a link says; null if it says no prompt. What it leaves out is left to the server.
 * @param {string} hash
 * @returns {Settings|null}
 */
export function fromHash(hash) {
  const found = new URLSearchParams(hash.replace(/^#/, ""));
  if (!found.get("prompt")) return null;
  return Object.fromEntries(Object.keys(FIRST).map((name) => [name, found.get(name) ?? ""]));
}

/**
 * The body of a request; what is empty is left to the server.
 * @param {Settings} settings
 * @param {string} sampler
 */
export function toRequest(settings, sampler) {
  /** @type {Record<string, unknown>} */
  const body = { prompt: settings.prompt };
  if (settings.remasking) body.remasking = settings.remasking;
  if (sampler) body.sampler = sampler;
  for (const name of NUMBERS) {
    const text = settings[name].trim();
    // What is no number goes as it is: the server says what is wrong with it, and in which field.
    if (text !== "") body[name] = Number.isFinite(Number(text)) ? Number(text) : text;
  }
  if (settings.mode) body.mode = settings.mode;
  if (settings.cache) body.cache = settings.cache === "none" ? null : settings.cache;
  if (settings.chat) body.chat = settings.chat === "on";
  return { ...body, ...toConstraint(settings) };
}

/**
 * The field of a request that says what the text must be, by its name; none without a pattern.
 * @param {Settings} settings
 * @returns {Record<string, string|string[]>}
 */
export function toConstraint({ constraint, pattern }) {
  if (!constraint || !pattern) return {};
  return { [constraint]: constraint === "guided_choice" ? pattern.split("\n").filter((line) => line !== "") : pattern };
}

/**
 * What a run would begin with, as far as the page can tell without the tokenizer: texts, and null for each mask.
 * @param {Settings} settings
 * @param {Record<string, any>} defaults
 * @param {string|null} mask
 * @returns {(string|null)[]}
 */
export function preview(settings, defaults, mask) {
  const parts = mask ? settings.prompt.split(mask) : [settings.prompt];
  const inside = parts.flatMap((part, i) => (i ? [null, part] : [part]));
  const after = Math.min(length(settings, defaults), 512);
  return [...inside, ...(after > 0 && parts.length === 1 ? ["\n"] : []), ...Array(Math.max(0, after)).fill(null)];
}

/**
 * One line on what the numbers mean together.
 * @param {Settings} settings
 * @param {Record<string, any>} defaults
 * @param {string|null} mask
 */
export function pace(settings, defaults, mask) {
  const inside = mask ? settings.prompt.split(mask).length - 1 : 0;
  const masks = inside + length(settings, defaults);
  const { steps, threshold, min_tokens, blocks } = settings.steps.trim() || settings.threshold.trim() ? settings : untold(settings, defaults);
  const where = blocks === "sliding" ? " of the block and the next" : "";
  const least = Number(min_tokens) > 1 ? `, and at least ${min_tokens} on average` : "";
  if (threshold) return `${masks} masks; each call writes every token${where} at least ${threshold} probable${least}`;
  if (!steps) return `${masks} masks; how many a call fills is left to the server`;
  const calls = Math.min(Number(steps) || masks, masks);
  const each = masks / Math.max(1, calls);
  const rounded = Number.isInteger(each) ? `${each}` : each.toFixed(1);
  return `${masks} masks in ${calls} steps: ${rounded} ${rounded === "1" ? "token" : "tokens"} per step`;
}

/**
 * The pace of a run that is told none: the server's, but it may choose another for other samplers and temperatures.
 * @param {Settings} settings
 * @param {Record<string, any>} defaults
 */
function untold(settings, defaults) {
  const usual = ["sampler", "temperature"].every((name) => !settings[name].trim() || settings[name] === String(defaults[name]));
  return usual ? defaults : { steps: "", threshold: "", min_tokens: "", blocks: "" };
}

/**
 * @param {Settings} settings
 * @param {Record<string, any>} defaults
 */
function length(settings, defaults) {
  return Number(settings.gen_length.trim() || defaults.gen_length) || 0;
}
