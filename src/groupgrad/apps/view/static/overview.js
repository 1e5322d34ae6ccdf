// The first page: how the runs are doing, what calls for a change, charts, where the time went, what differs.
import { CHARTS, makeChart, otherCharts, runMark } from "./charts.js";
import { compareEvaluations, evaluationsCard } from "./evaluations.js";
import { duration, el, fill, runColor, short } from "./dom.js";

const PHASES = ["sampling", "weights", "rewards", "scoring", "training"];

/** The page of the runs that are shown. Returns `{node, update, updateTiles, dispose}`; `update` draws anew after new metrics. */
export function overview(state, { openStep, source }) {
  const node = el("div", { class: "overview" });
  const tiles = el("section", { class: "tiles", "aria-label": "Latest numbers" });
  const notes = el("section", { class: "notes", "aria-label": "Warnings" });
  const charts = el("section", { class: "charts", "aria-label": "Charts" });
  const more = el("div", { class: "charts" });
  const others = el("details", { class: "others", ontoggle: () => draw() }, el("summary", {}, el("h2", {}, "All other metrics")), more);
  const evaluations = el("section", { class: "rest", "aria-label": "Evaluations" });
  const rest = el("section", { class: "rest" });
  const smoothing = el("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: state.smoothing, id: "smoothing", oninput: () => {
    state.smoothing = Number(smoothing.value);
    draw();
  } });
  const tools = el("div", { class: "tools" }, el("label", { for: "smoothing" }, "Smoothing"), smoothing,
    el("span", { class: "quiet", id: "chart-keys" }, "drag to zoom, double-click to reset, click a step for its rollouts; by keyboard: Tab to a chart, arrow keys, + and - to zoom, 0 to reset, Enter for the rollouts"));
  node.append(tiles, notes, tools, charts, others, evaluations, rest);
  let drawn = [];
  let asked = 0; // comparisons that were asked for; only the answer to the last one is shown

  function dispose() {
    drawn.forEach((figure) => figure.dispose());
    drawn = [];
  }

  function draw() {
    const zooms = new Map(drawn.map((figure) => [figure.dataset.chart, figure.zoom()]));
    const focused = drawn.find((figure) => figure.contains(document.activeElement));
    const step = focused?.walk.step() ?? null;
    dispose();
    const runs = state.runs.filter((run) => run.shown);
    const options = { weight: state.smoothing, sync: "steps", onStep: (run, step) => openStep(run.index, step) };
    const make = (wanted) => wanted.map((chart) => makeChart(chart, runs, options)).filter(Boolean);
    const made = make(CHARTS);
    const rare = others.open ? make(otherCharts(runs)) : [];
    fill(more, rare);
    fill(charts, made.length ? made : el("p", { class: "quiet" }, "No metrics yet: the first log event comes after logging_steps steps."));
    drawn = [...made, ...rare];
    drawn.forEach((figure) => figure.zoom(zooms.get(figure.dataset.chart)));
    if (focused) drawn.find((figure) => figure.dataset.chart === focused.dataset.chart)?.walk.resume(step);
  }

  function updateTiles() {
    fill(tiles, state.runs.filter((run) => run.shown).map(tilesOf));
  }

  function update() {
    const runs = state.runs.filter((run) => run.shown);
    updateTiles();
    fill(notes, notesOf(runs));
    draw();
    compare(runs);
    const isOpen = rest.querySelector("details.settings")?.open ?? false;
    fill(rest, timeCard(runs), runs.length > 1 ? differences(runs) : settingsCard(runs[0]), ...runs.map(eventsCard));
    rest.querySelector("details.settings")?.toggleAttribute("open", isOpen);
  }

  /** Compares the evaluations anew; what was shown stays until the answer is there, or if there is none. */
  async function compare(runs) {
    const number = ++asked;
    const compared = await compareEvaluations(runs, source).catch(() => null);
    if (compared !== null && number === asked) fill(evaluations, evaluationsCard(compared));
  }

  update();
  return { node, update, updateTiles, dispose };
}

function latest(run, name) {
  return (run.columns.values[name] ?? []).findLast((value) => value !== null) ?? null;
}

function tilesOf(run) {
  const steps = Math.max(run.columns.step.at(-1) ?? 0, run.summary.step ?? 0); // log events are fewer than steps
  const total = run.summary.max_steps;
  const share = latest(run, "frac_reward_zero_std");
  const truncated = latest(run, "completions/clipped_ratio");
  const tile = (name, value, extra) => el("div", { class: "tile" }, el("small", {}, name), el("b", {}, value), extra && el("small", {}, extra));
  const perStep = latest(run, "step_time");
  const left = total && run.summary.state === "running" && perStep && total > steps ? `about ${duration((total - steps) * perStep)} left` : run.summary.state;
  const bar = el("div", { class: "bar", role: "progressbar", "aria-valuemin": 0, "aria-valuemax": total ?? steps, "aria-valuenow": steps }, el("i"));
  bar.firstChild.style.width = `${total ? Math.min(100, (100 * steps) / total) : 100}%`;
  bar.firstChild.style.backgroundColor = runColor(run.index);
  return el("div", { class: "row" },
    el("div", { class: "tile wide" }, el("small", {}, runMark(run.index), run.name), el("b", {}, `step ${short(steps)}${total ? ` of ${short(total)}` : ""}`), bar, el("small", {}, left)),
    tile("reward", short(latest(run, "reward")), `± ${short(latest(run, "reward_std"))}`),
    latest(run, "eval_reward") !== null && tile("held-out reward", short(latest(run, "eval_reward"))),
    tile("effective groups", share === null ? "–" : `${Math.round(100 * (1 - share))} %`),
    tile("length", short(latest(run, "completions/mean_length"), 1), `${truncated === null ? "–" : `${Math.round(100 * truncated)} %`} truncated`),
    tile("entropy", short(latest(run, "entropy"))),
    tile("a step", duration(perStep), `${short(latest(run, "tokens_per_second"))} tokens/s`));
}

/** True for a failure or a stop that the run has not gone on from. */
function isEnd(event, run) {
  return ["failed", "stopped"].includes(event.event) && event.event === run.summary.state;
}

/** Warnings of all runs; those that several runs share are one. */
function notesOf(runs) {
  const mark = (run) => runMark(run.index);
  const bad = runs.flatMap((run) => run.summary.events.filter((event) => event.event === "error" || isEnd(event, run)).slice(-1)
    .map((event) => el("article", { class: "note bad" }, el("p", {}, mark(run), el("b", {}, `${run.name}: ${event.event} at step ${event.step}`)), el("p", {}, event.text ?? ""))));
  const shared = new Map();
  for (const run of runs) {
    for (const found of run.summary.advice) shared.set(found.metric, [...(shared.get(found.metric) ?? []), { run, found }]);
  }
  const own = [...shared.values()].map((all) => el("article", { class: "note" },
    all.map(({ run, found }) => el("p", {}, mark(run), el("b", {}, runs.length > 1 && `${run.name}: `, found.text))),
    el("p", {}, all[0].found.setting),
    el("small", {}, all[0].found.metric)));
  return [...bad, ...own];
}

function timeCard(runs) {
  const bars = runs.map((run) => {
    const seconds = PHASES.map((phase) => mean(run.columns.values[`time/${phase}`]));
    const total = seconds.reduce((sum, value) => sum + (value ?? 0), 0);
    if (!total) return null;
    const bar = el("div", { class: "stack" }, seconds.map((value, place) => {
      if (!value) return null;
      const part = el("i", { class: `phase-${PHASES[place]}`, title: `${PHASES[place]} ${duration(value)}` });
      part.style.flexGrow = value / total; // grows of less than 1 in all would leave a part of the bar empty
      return part;
    }));
    const words = PHASES.map((phase, place) => seconds[place] > 0 && el("span", {}, el("i", { class: `swatch phase-${phase}` }), `${phase} ${duration(seconds[place])} (${Math.round((100 * seconds[place]) / total)} %)`));
    return el("div", {}, runs.length > 1 && el("small", {}, run.name), bar, el("p", { class: "keys" }, words));
  }).filter(Boolean);
  return bars.length ? el("section", { class: "card" }, el("h2", {}, "Where the time went"), el("p", { class: "quiet" }, "mean of the last 50 log events"), bars) : null;
}

function mean(values) {
  const known = (values ?? []).filter((value) => value !== null).slice(-50);
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
}

function settingsOf(run) {
  const { settings = {}, model, dtype, quantization, adapter, data, rewards, reward_functions: functions, processes, max_steps: steps } = run.summary.config;
  const ofAdapter = Object.entries(adapter ?? {}).map(([name, value]) => [`adapter.${name}`, value]);
  const rows = data ? `${data.rows} rows, ${data.digest}` : undefined;
  return { model, dtype, quantization, ...Object.fromEntries(ofAdapter), data: rows, rewards: (rewards ?? []).join(", "), "reward functions": functions?.join(", "), processes, max_steps: steps, ...settings };
}

const text = (value) => (value === undefined ? "–" : typeof value === "string" ? value : JSON.stringify(value));

/** The values of a setting, numbers without the digits that rounding leaves behind, unless these alone tell them apart. */
function textsOf(values) {
  const exact = values.map(text);
  const brief = values.map((value) => text(typeof value === "number" ? Number(value.toPrecision(12)) : value));
  return new Set(brief).size === new Set(exact).size ? brief : exact;
}

function differences(runs) {
  const all = runs.map(settingsOf);
  const names = [...new Set(all.flatMap((settings) => Object.keys(settings)))];
  const isKnown = (name) => name !== "reward functions" || all.every((settings) => settings[name]); // earlier releases have not recorded them
  const differing = names.filter((name) => name !== "output_dir" && name !== "run_name" && isKnown(name) && new Set(all.map((settings) => text(settings[name]))).size > 1);
  const body = differing.length
    ? el("div", { class: "scroll" }, el("table", { class: "differences" },
      el("thead", {}, el("tr", {}, el("th", {}, "setting"), runs.map((run) => el("th", {}, runMark(run.index), run.name)))),
      el("tbody", {}, differing.map((name) => el("tr", {}, el("th", {}, name), textsOf(all.map((settings) => settings[name])).map((value) => el("td", {}, value)))))))
    : el("p", { class: "quiet" }, "Their configurations are the same.");
  return el("section", { class: "card" }, el("h2", {}, "What the configurations differ in"), body);
}

function settingsCard(run) {
  if (!run) return null;
  const entries = Object.entries(settingsOf(run)).filter(([, value]) => value !== null && value !== undefined && value !== "");
  return el("section", { class: "card" }, el("details", { class: "settings" }, el("summary", {}, el("h2", {}, "Settings")),
    el("div", { class: "scroll" }, el("table", {}, el("tbody", {}, entries.map(([name, value]) => el("tr", {}, el("th", {}, name), el("td", {}, textsOf([value])))))))));
}

function eventsCard(run) {
  const events = run.summary.events.slice(-40).reverse();
  if (!events.length) return null;
  const about = (event) => event.text ?? event.folder ?? event.checkpoint ?? "";
  return el("section", { class: "card" }, el("h2", {}, runMark(run.index), `Events of ${run.name}`),
    el("ul", { class: "events" }, events.map((event) => el("li", { class: `event ${["warning", "error", "failed", "skipped_step"].includes(event.event) ? "bad" : ""}` },
      el("span", { class: "quiet" }, `step ${event.step}`), el("b", {}, String(event.event).replace("_", " ")), el("span", {}, about(event))))));
}
