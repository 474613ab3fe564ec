/** The form's values, the link that holds them, and the request that is made of them. */

/** @typedef {Record<string, string>} Settings what the fields say, as text; "" where nothing was said */

/** A first visit: short, and in few enough steps that deciding positions by themselves shows. */
export const FIRST = Object.freeze({
  prompt: "Lena buys 4 pens for $3 each and a book for $8. How much does she pay?",
  steps: "8",
  gen_length: "64",
  remasking: "low_confidence",
  sampler: "any_order",
  block_length: "32",
  temperature: "0",
  threshold: "",
  seed: "0",
  chat: "",
});

const NUMBERS = ["steps", "gen_length", "block_length", "temperature", "threshold", "seed"];

/** @typedef {{title: string, prompt: string, changes?: Settings}} Example `{mask}` stands for the model's mask */

/** @type {Example[]} */
export const EXAMPLES = [
  { title: "Pens and a book", prompt: FIRST.prompt },
  { title: "Apples", prompt: "Tom has 12 apples. He buys 7 more. How many apples does he have now?" },
  { title: "Stamps", prompt: "Mia has 84 stamps. She gives half of them to Tom. How many does she keep?" },
  {
    title: "Fill the masks",
    prompt: `Once upon a time there was a${"{mask}".repeat(8)} who lived in${"{mask}".repeat(6)}.`,
    changes: { gen_length: "0", steps: "2" },
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
 * @param {HTMLFormElement} form
 * @param {Settings} settings
 */
export function writeForm(form, settings) {
  for (const name of Object.keys(FIRST)) {
    const input = field(form, name);
    input.value = settings[name] ?? "";
    // A select that lacks the value (an order of another server) would silently be empty.
    if (input instanceof HTMLSelectElement && input.selectedIndex < 0) input.value = FIRST[/** @type {keyof typeof FIRST} */ (name)];
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
  return `#${new URLSearchParams(settings)}`;
}

/**
 * What a link says; null if it says no prompt. What it leaves out is as on a first visit.
 * @param {string} hash
 * @returns {Settings|null}
 */
export function fromHash(hash) {
  const found = new URLSearchParams(hash.replace(/^#/, ""));
  if (!found.get("prompt")) return null;
  return Object.fromEntries(Object.entries(FIRST).map(([name, first]) => [name, found.get(name) ?? first]));
}

/**
 * The body of a request; what is empty is left to the server.
 * @param {Settings} settings
 * @param {string} sampler
 */
export function toRequest(settings, sampler) {
  /** @type {Record<string, unknown>} */
  const body = { prompt: settings.prompt, remasking: settings.remasking, sampler };
  for (const name of NUMBERS) {
    const text = settings[name].trim();
    // What is no number goes as it is: the server says what is wrong with it, and in which field.
    if (text !== "") body[name] = Number.isFinite(Number(text)) ? Number(text) : text;
  }
  if (settings.chat) body.chat = settings.chat === "on";
  return body;
}

/**
 * What a run would begin with, as far as the page can tell without the tokenizer: texts, and null for each mask.
 * @param {Settings} settings
 * @param {string|null} mask
 * @returns {(string|null)[]}
 */
export function preview(settings, mask) {
  const parts = mask ? settings.prompt.split(mask) : [settings.prompt];
  const inside = parts.flatMap((part, i) => (i ? [null, part] : [part]));
  const after = Math.min(Number(settings.gen_length) || 0, 512);
  return [...inside, ...(after > 0 && parts.length === 1 ? ["\n"] : []), ...Array(Math.max(0, after)).fill(null)];
}

/**
 * One line on what the numbers mean together.
 * @param {Settings} settings
 * @param {string|null} mask
 */
export function pace(settings, mask) {
  const inside = mask ? settings.prompt.split(mask).length - 1 : 0;
  const masks = inside + (Number(settings.gen_length) || 0);
  if (settings.threshold.trim()) return `${masks} masks; each call writes every token at least ${settings.threshold} probable`;
  const steps = Number(settings.steps) || masks;
  const each = masks / Math.max(1, Math.min(steps, masks));
  const rounded = Number.isInteger(each) ? `${each}` : each.toFixed(1);
  return `${masks} masks in ${Math.min(steps, masks)} steps: ${rounded} ${rounded === "1" ? "token" : "tokens"} a step`;
}
