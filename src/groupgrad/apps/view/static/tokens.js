// The tokens of a completion, shaded by a number of each.
import { counted, el, fill, short } from "./dom.js";

const FIRST = 3000;
const BOUNDS = [0.1, 0.35, 0.75, 1.5, 3, 6];
const ADVANTAGE = [0.05, 0.25, 0.5, 1, 1.5, 2.5];

/** What tokens can be shaded by. */
export const SHADES = { logprobs: "log-prob", entropy: "entropy", advantage: "advantage", none: "nothing" };

function level(size, bounds) {
  let found = 0;
  while (found < bounds.length && size >= bounds[found]) found += 1;
  return found;
}

/** The advantage of a token: its turn's, where turns have their own. */
function advantageOf(row, place) {
  if (!row.turn_advantages) return row.advantage;
  let turn = -1;
  for (let at = 0; at <= place; at += 1) {
    if (isSampled(row, at) && (at === 0 || !isSampled(row, at - 1) || branchAt(row, at))) turn += 1;
  }
  return row.turn_advantages[turn] ?? null;
}

/** The branch that begins at a token, if one does. */
function branchAt(row, place) {
  return (row.branches ?? []).find((branch) => branch.start === place);
}

function isSampled(row, place) {
  return !row.sampled || row.sampled[place];
}

function shadeOf(row, place, by) {
  if (!isSampled(row, place)) return "tool";
  if (by === "advantage") {
    const advantage = advantageOf(row, place);
    return advantage === null ? "s0" : `${advantage < 0 ? "n" : "p"}${level(Math.abs(advantage), ADVANTAGE)}`;
  }
  const value = by === "none" ? null : row[by]?.[place] ?? null;
  return value === null ? "s0" : `s${level(Math.abs(value), BOUNDS)}`;
}

/** Spans of tokens between which the writer changes from the policy to others or back, or a branch begins:
 * `[{own, start, end}]`. */
function spansOf(row, end) {
  const spans = [];
  for (let place = 0; place < end; place += 1) {
    const own = isSampled(row, place);
    const last = spans[spans.length - 1];
    if (last && last.own === own && !branchAt(row, place)) last.end = place + 1;
    else spans.push({ own, start: place, end: place + 1 });
  }
  return spans;
}

/** The tokens of a row as a block; what tools and templates wrote is folded. `say(text)` shows the numbers of a
 * token. */
export function tokenBlock(row, by, say) {
  const block = el("div", { class: "tokens", tabindex: 0, role: "textbox", "aria-readonly": "true", "aria-multiline": "true", "aria-label": `Completion ${row.row}, arrow keys move over its tokens` });
  let current = -1;
  const token = (place) => {
    const node = el("span", { class: shadeOf(row, place, by) }, row.tokens[place]);
    node.place = place;
    return node;
  };
  const draw = (end) => {
    const parts = spansOf(row, end).map(({ own, start, end: stop }) => {
      const nodes = [];
      for (let place = start; place < stop; place += 1) nodes.push(token(place));
      const branch = branchAt(row, start);
      const head = branch && el("div", { class: "branch" }, `branch: continues ${counted(branch.context.length, "other token")}`);
      return own ? [head, nodes] : [head, el("details", { class: "reply" }, el("summary", {}, `tool or template, ${counted(stop - start, "token")}`), nodes)];
    });
    const left = row.tokens.length - end;
    fill(block, parts, left > 0 && el("button", { type: "button", onclick: () => draw(row.tokens.length) }, `show ${counted(left, "more token")}`));
  };
  const show = (node) => {
    block.querySelector(".at")?.classList.remove("at");
    if (!node || node.place === undefined) return;
    current = node.place;
    node.classList.add("at");
    say(describe(row, current));
  };
  block.addEventListener("pointerover", (event) => show(event.target));
  block.addEventListener("click", (event) => show(event.target));
  block.addEventListener("keydown", (event) => {
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!move) return;
    event.preventDefault();
    const all = [...block.querySelectorAll("span")];
    const at = all.findIndex((node) => node.place === current);
    const next = all[Math.max(0, Math.min(all.length - 1, at + move))];
    show(next);
    next?.scrollIntoView({ block: "nearest" });
  });
  draw(Math.min(FIRST, row.tokens.length));
  return block;
}

function describe(row, place) {
  const logprob = row.logprobs?.[place] ?? null;
  const entropy = row.entropy?.[place] ?? null;
  const chance = logprob === null ? "" : ` (${short(100 * Math.exp(logprob), 2)} %)`;
  const writer = isSampled(row, place) ? "" : ", written by a tool or the template";
  return `token ${place}: ${JSON.stringify(row.tokens[place])} · id ${row.completion_ids[place]} · log-prob ${short(logprob)}${chance} · entropy ${short(entropy)} · advantage ${short(row.advantage)}${writer}`;
}

/** The key of the shades. */
export function legend(by) {
  if (by === "none") return null;
  const names = by === "advantage" ? ["n6", "n4", "n2", "s0", "p2", "p4", "p6"] : ["s0", "s1", "s2", "s3", "s4", "s5", "s6"];
  const ends = by === "advantage" ? ["held back", "reinforced"] : by === "logprobs" ? ["likely", "unlikely"] : ["sure", "unsure"];
  return el("span", { class: "legend", "aria-hidden": "true" }, ends[0], names.map((name) => el("i", { class: name })), ends[1]);
}
