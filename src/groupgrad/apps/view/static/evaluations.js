// Evaluations compared prompt by prompt: the last of a run with its first, or the last of several runs.
import { runMark } from "./charts.js";
import { counted, el, short } from "./dom.js";

const UNITS = { length: "length (tokens)", truncated: "truncated (share)" };

/** What the shown runs are compared with: one run with its own first evaluation, several with the first of them. */
export async function compareEvaluations(runs, source) {
  const pairs = runs.length > 1 ? runs.slice(1).map((run) => [run, runs[0]]) : runs.map((run) => [run, null]);
  const answers = await Promise.all(pairs.map(([run, base]) => source.evaluations(run.index, base?.index)));
  return pairs.flatMap(([run, base], place) => (answers[place] ?? []).map((found) => ({ run, base, found })));
}

/** The card of these comparisons; null without any. */
export function evaluationsCard(compared) {
  if (!compared.length) return null;
  return el("section", { class: "card evaluations" }, el("h2", {}, "Evaluations compared"),
    el("p", { class: "quiet" }, "on the same prompts, with 95 % intervals over prompts; p is that of the sign-flip test of the differences by prompt"),
    compared.map(tableOf));
}

function tableOf({ run, base, found }) {
  const name = base ? `${run.name} less ${base.name}` : "last less first";
  const head = (of, step) => el("th", {}, of && runMark(of.index), of && `${of.name}, `, `step ${short(step)}`);
  if (!found.rows.length) return el("p", {}, `${found.phase}: ${name} have no scored prompt in common.`);
  const rowsOf = (rows) => rows.map((row) => el("tr", {}, el("th", {}, UNITS[row.name] ?? row.name), [row.there, row.here, row.difference].map(cellOf), el("td", {}, short(row.p))));
  const partOf = (part) => el("tbody", {}, el("tr", {}, el("th", { colspan: 5 }, `${found.by.column} ${part.value}, ${counted(part.prompts, "prompt")}`)), rowsOf(part.rows));
  return el("div", { class: "scroll" }, el("table", {},
    el("thead", {}, el("tr", {}, el("th", {}, `${found.phase}, ${counted(found.prompts, "prompt")}`), head(base, found.there), head(base && run, found.here), el("th", {}, name), el("th", {}, "p"))),
    el("tbody", {}, rowsOf(found.rows)), found.by?.values.map(partOf)),
    found.rewards_differ && el("p", { class: "quiet" }, "Their reward functions differ, so “reward” is not the same number in both."));
}

function cellOf({ mean, low, high, prompts }) {
  return el("td", {}, short(mean), prompts > 1 && el("small", {}, ` (${short(low)} to ${short(high)})`));
}
