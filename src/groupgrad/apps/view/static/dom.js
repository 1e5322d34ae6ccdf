// Makes elements. Texts of a run become text nodes alone, so markup in them stays text.

/** An element: `el("a", {class: "x", onclick: f}, "text", child)`. Attributes that are null or false are left out. */
export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "value") node.value = value;
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  append(node, children);
  return node;
}

function append(node, children) {
  for (const child of children) {
    if (child === null || child === undefined || child === false) continue;
    if (Array.isArray(child)) append(node, child);
    else node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

/** Puts children in the place of all that a node holds. */
export function fill(node, ...children) {
  node.replaceChildren();
  append(node, children);
}

/** A number in a few characters; a dash for none. */
export function short(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(1);
  if (size >= 1000) return value.toLocaleString("en-US", { maximumFractionDigits: 0 });
  return Number(value.toFixed(size >= 100 ? 0 : size >= 10 ? Math.min(1, digits) : digits)).toString();
}

/** The value of a tick of an axis, with the digits that tell it from the next tick, which is `step` away. */
export function tickText(value, step) {
  if (value === 0) return "0";
  const size = Math.floor(Math.log10(Math.abs(value)));
  const digits = Math.max(0, size - Math.floor(Math.log10(step)) + 1); // one more, for steps of 2.5
  if ((size < -3 && step < 1e-4) || size >= 6) return value.toExponential(Math.min(digits, 20)).replace(/\.?0+e/, "e");
  return Number(value.toPrecision(Math.min(digits + 1, 20))).toLocaleString("en-US", { maximumFractionDigits: 20 });
}

/** A number of things: "1 rollout", "2,000 rollouts". */
export function counted(number, noun) {
  return `${number.toLocaleString("en-US")} ${noun}${number === 1 ? "" : "s"}`;
}

/** A share in per cent, with its sign. */
export function percent(value) {
  return `${value > 0 ? "+" : ""}${short(100 * value, 2)} %`;
}

/** Seconds as a duration. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "–";
  if (seconds > 0 && seconds < 5e-5) return "<0.1 ms";
  if (seconds < 0.9995) return `${short(seconds * 1000, seconds < 9.95e-3 ? 1 : 0)} ms`;
  if (seconds < 120) return `${short(seconds, 1)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  return `${short(seconds / 3600, 1)} h`;
}

/** Colours of runs; those that come later have dashes too. */
export const NUM_COLORS = 8;

/** The colour of a run's lines. */
export function runColor(index) {
  const style = getComputedStyle(document.documentElement);
  return style.getPropertyValue(`--run-${index % NUM_COLORS}`).trim() || "#2f6fde";
}

/** The text of a prompt or completion: messages one below the other. */
export function plainText(text, isMessages) {
  if (!isMessages || text === null) return text ?? "";
  try {
    return JSON.parse(text).map((message) => `${message.role}: ${contentText(message)}`).join("\n");
  } catch {
    return text;
  }
}

/** The reasoning and content of a message, with its tool calls. */
export function contentText(message) {
  const { content } = message;
  const reasoning = message.reasoning_content ?? message.reasoning ?? message.thinking ?? "";
  const blocks = Array.isArray(content) ? content.map((block) => block.text ?? `[${block.type ?? "block"}]`) : [content ?? ""];
  const calls = (message.tool_calls ?? []).map((call) => `→ ${JSON.stringify(call.function ?? call)}`);
  return [reasoning, ...blocks, ...calls].filter((part) => part !== "").join("\n");
}
