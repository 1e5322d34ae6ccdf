// Charts of metrics over steps, drawn by uPlot.
import { NUM_COLORS, el, fill, runColor, short, tickText } from "./dom.js";

const DASHES = [[], [6, 4], [2, 3], [8, 3, 2, 3]];
const LEADS = [[14, 3], [6, 8], [2, 8], [8, 3, 2, 8]];

/** Lengths of the dashes of a line, empty for a solid one: `place` is that of its metric in the chart, `index` that of its
 * run. After the first runs, whose colours differ, a dot marks each further use of a colour. */
export function dashes(place, index) {
  const uses = Math.floor(index / NUM_COLORS);
  return uses ? [...LEADS[place % LEADS.length], ...Array(uses).fill([2, 3]).flat()] : DASHES[place % DASHES.length];
}

/** The charts of the overview: title, metrics (the first that a run has is drawn) and how values are read. */
export const CHARTS = [
  { title: "Reward", keys: ["reward", "eval_reward", "dynamic_sampling/reward"], hint: "weighted mean; dashed: held-out; dotted: all sampled" },
  { title: "Reward functions", prefix: "rewards/", suffix: "/mean", hint: "mean of each function" },
  { title: "Effective groups", keys: ["frac_reward_zero_std"], map: (value) => 1 - value, isShare: true, hint: "share of groups whose rewards differ: only these teach" },
  { title: "Completion length", keys: ["completions/mean_length", "completions/max_length"], hint: "tokens; dashed: the longest" },
  { title: "Truncated", keys: ["completions/clipped_ratio"], isShare: true, hint: "share of completions that ended at a limit" },
  { title: "Entropy", keys: ["entropy"], hint: "nats a token" },
  { title: "KL to the reference", keys: ["kl"], hint: "nats a token; only with beta above 0" },
  { title: "Clipped tokens", keys: ["clip_ratio/high_mean", "clip_ratio/low_mean", "cispo_clip_ratio"], isShare: true, hint: "share above the trust region; dashed: below" },
  { title: "Gradient norm", keys: ["grad_norm"], hint: "before clipping" },
  { title: "Sampler and trainer", keys: ["sampling/sampling_logp_difference/mean", "sampling/logp_mismatch"], hint: "difference of their log-probs, nats" },
  { title: "Loss", keys: ["loss"], hint: "near 0 in an on-policy step, whatever is learned" },
  { title: "Learning rate", keys: ["learning_rate"], hint: "" },
  { title: "Tokens a second", derived: "tokens_per_second", hint: "prompt and sampled tokens over wall-clock time" },
  { title: "Time of a step", keys: ["step_time"], hint: "seconds" },
];

/** Charts of the metrics that have no chart of their own. */
export function otherCharts(runs) {
  const known = new Set(CHARTS.flatMap((chart) => chart.keys ?? [chart.derived]));
  const isOwn = (name) => known.has(name) || (name.startsWith("rewards/") && name.endsWith("/mean")) || ["time", "epoch", "tokens_per_second", "num_tokens"].includes(name);
  const names = new Set(runs.flatMap((run) => Object.keys(run.columns.values)).filter((name) => !isOwn(name)));
  return [...names].sort().map((name) => ({ title: name, keys: [name], hint: "" }));
}

/** Metrics of a run by name: `{step: [...], values: {name: [...]}}` of equal lengths, null where a line has none. */
export function columnsOf(lines) {
  const steps = [];
  const values = {};
  let previous = null;
  for (const line of lines) {
    let place = steps.length - 1;
    if (place < 0 || steps[place] !== line.step) {
      steps.push(line.step);
      place += 1;
    }
    for (const [name, value] of Object.entries(line)) {
      if (typeof value === "number" && name !== "step") (values[name] ??= [])[place] = value;
    }
    if (line.num_tokens !== undefined && line.time !== undefined && line.loss !== undefined) {
      if (previous && line.time > previous.time) {
        (values.tokens_per_second ??= [])[place] = Math.max(0, line.num_tokens - previous.num_tokens) / (line.time - previous.time);
      }
      previous = line;
    }
  }
  for (const name of Object.keys(values)) {
    const column = values[name];
    values[name] = Array.from({ length: steps.length }, (_, place) => column[place] ?? null);
  }
  return { step: steps, values };
}

/** Exponential moving average; weight 0 leaves the values as they are. */
export function smoothed(values, weight) {
  if (!weight) return values;
  let mean = null;
  return values.map((value) => {
    if (value === null) return null;
    mean = mean === null ? value : weight * mean + (1 - weight) * value;
    return mean;
  });
}

/** The lines of a chart: `[{run, name, column}]` for the runs that are shown. */
function seriesOf(chart, runs) {
  const found = [];
  for (const run of runs) {
    let names = chart.derived ? [chart.derived] : chart.keys;
    if (chart.prefix) {
      names = Object.keys(run.columns.values).filter((name) => name.startsWith(chart.prefix) && name.endsWith(chart.suffix));
    }
    names.forEach((name, place) => {
      const column = run.columns.values[name];
      if (column) found.push({ run, name, column: chart.map ? column.map((v) => (v === null ? null : chart.map(v))) : column, place });
    });
  }
  return found;
}

function label(series, chart, manyRuns) {
  const name = chart.prefix ? series.name.slice(chart.prefix.length, -chart.suffix.length) : series.name;
  return manyRuns ? `${series.run.name} · ${name}` : name;
}

/** The ends of an axis for numbers from `low` to `high`; shares end at 1. */
function rangeOf(low, high, isShare) {
  if (!low && !high) return [0, 1]; // zeros would get an axis up to 100; without numbers in a zoom both ends are null
  const [lower, upper] = uPlot.rangeNum(low, high, 0.1, true);
  return isShare ? [Math.max(lower, 0), Math.min(upper, 1)] : [lower, upper];
}

/** A chart as a figure, or null if no run has its metrics. `onStep(run, step)` is called for a step that is chosen. */
export function makeChart(chart, runs, { weight, sync, onStep }) {
  const series = seriesOf(chart, runs);
  if (!series.length || series.every(({ column }) => column.every((value) => value === null))) return null;
  const last = el("span", { class: "now" });
  const holder = el("div", { class: "plot", tabindex: 0, role: "slider", "aria-label": chart.title, "aria-describedby": "chart-keys" });
  const figure = el("figure", { class: "card chart" }, el("figcaption", {}, el("b", {}, chart.title), last, chart.hint && el("small", {}, chart.hint)), holder);
  const tables = series.map(({ run, column }) => [run.columns.step, smoothed(column, weight)]);
  const data = uPlot.join(tables);
  const style = getComputedStyle(document.documentElement);
  const ink = style.getPropertyValue("--quiet").trim();
  const grid = { stroke: style.getPropertyValue("--grid").trim(), width: 1 };
  const axis = { stroke: ink, grid, ticks: { ...grid, size: 4 }, font: "11px system-ui", size: 26 };
  const isOne = chart.prefix && runs.length === 1; // then colours are those of its parts
  const indexOf = (s) => (isOne ? s.place : s.run.index);
  const dashOf = (s) => dashes(isOne ? 0 : s.place, indexOf(s));
  const options = {
    width: 320,
    height: 170,
    padding: [8, 10, 0, 0],
    legend: { show: false },
    cursor: { sync: { key: sync }, points: { size: 6 }, drag: { x: true, y: false } },
    scales: { x: { time: false }, y: { range: (_, low, high) => rangeOf(low, high, chart.isShare) } },
    axes: [axis, { ...axis, size: 52, values: (_, ticks, _axis, _space, step) => ticks.map((value) => tickText(value, step)) }],
    series: [{ label: "step" }, ...series.map((s) => ({
      label: label(s, chart, runs.length > 1),
      stroke: runColor(indexOf(s)),
      dash: dashOf(s),
      width: 1.6,
      spanGaps: true,
      points: { show: s.column.filter((value) => value !== null).length < 3 },
    }))],
    hooks: { setCursor: [(plot) => readOut(plot)] },
  };
  const readOut = (plot) => {
    const place = plot.cursor.idx ?? null;
    const parts = series.map((s, index) => {
      const values = data[index + 1];
      let at = place;
      if (at === null || at === undefined) for (at = values.length - 1; at > 0 && (values[at] ?? null) === null; at -= 1);
      const isNamed = chart.prefix && (isOne || s.run === runs[0]);
      const unseen = runs.length > 1 && el("span", { class: "unseen" }, `${isNamed ? s.run.name : label(s, chart, true)}: `); // what the colour says
      return el("span", { class: "value", title: label(s, chart, runs.length > 1) }, swatch(runColor(indexOf(s)), dashOf(s)), unseen, isNamed && `${label(s, chart, false)} `, short(values[at]));
    });
    fill(last, place === null ? "" : `step ${data[0][place]} `, parts);
  };
  const plot = new uPlot(options, data, holder);
  readOut(plot);
  /** The run whose line is nearest to a height of the chart at a step. */
  const nearest = (place, top) => {
    const away = (index) => Math.abs(plot.valToPos(data[index + 1][place], "y") - top);
    const there = [...series.keys()].filter((index) => (data[index + 1][place] ?? null) !== null);
    return there.length ? series[there.reduce((best, index) => (away(index) < away(best) ? index : best))].run : firstWith(data[0][place]);
  };
  const firstWith = (step) => runs.find((run) => run.columns.step.includes(step));
  plot.over.addEventListener("click", () => {
    const place = plot.cursor.idx;
    if (onStep && place !== null && place !== undefined && plot.select.width === 0) onStep(nearest(place, plot.cursor.top), data[0][place]);
  });
  const walk = walkByKeyboard({ plot, plots: () => uPlot.sync(sync).plots, holder, data, onStep: onStep && ((step) => onStep(firstWith(step), step)), spoken: (place) => series.map((s, index) => `${label(s, chart, runs.length > 1)} ${short(data[index + 1][place])}`).join(", ") });
  const observer = new ResizeObserver(() => {
    plot.setSize({ width: Math.max(180, holder.clientWidth), height: 170 });
    queueMicrotask(walk.stay); // once the new size is in force
  });
  observer.observe(holder);
  figure.dataset.chart = chart.title;
  /** The steps that are zoomed to, null for all of them; with an argument zooms to these. */
  figure.zoom = (range) => {
    if (range) plot.setScale("x", range);
    const { min, max } = plot.scales.x;
    const isKnown = Number.isFinite(min) && Number.isFinite(max); // not before the first drawing
    return isKnown && (min > data[0][0] || max < data[0].at(-1)) ? { min, max } : null;
  };
  figure.walk = walk;
  figure.dispose = () => { observer.disconnect(); walk.end(); plot.destroy(); };
  return figure;
}

/** By key, how many times as many steps it shows; = is the + of keyboards on which + needs Shift. */
const ZOOMS = { "+": 0.5, "=": 0.5, "-": 2, 0: Infinity };

/** Lets the arrow keys, Page Up, Page Down, Home and End move the cursor of a chart over its steps, + and - zoom all `plots()`
 * around it, 0 show all steps, Enter open a step, and Escape leave. A screen reader says what `spoken(place)` returns. */
function walkByKeyboard({ plot, plots, holder, data, onStep, spoken }) {
  const steps = data[0];
  const places = [...steps.keys()].filter((place) => data.slice(1).some((values) => (values[place] ?? null) !== null));
  let current = null;

  function say(place) {
    holder.setAttribute("aria-valuenow", steps[place]);
    holder.setAttribute("aria-valuetext", `step ${steps[place]}: ${spoken(place)}`);
  }

  function move(place) {
    current = place;
    plot.setCursor(place === null ? { left: -10, top: -10 } : { left: plot.valToPos(steps[place], "x"), top: 60 }, true, true);
    if (place !== null) say(place);
  }

  /** Shows `factor` times as many steps as now in all charts, around the cursor or the middle; Infinity for all steps. */
  function zoom(factor) {
    const { min, max } = plot.scales.x;
    const cursor = plot.cursor.idx ?? null;
    const center = cursor === null ? (min + max) / 2 : steps[cursor];
    const width = Math.min((max - min) * factor, steps.at(-1) - steps[0]);
    const low = Math.max(steps[0], Math.min(center - width / 2, steps.at(-1) - width));
    const seen = steps.filter((step) => step >= low && step <= low + width);
    if (seen.length < 2) return; // no line would be left
    const isAll = seen.length === steps.length;
    for (const other of plots()) {
      const all = other.data[0];
      if (all.length > 1) other.setScale("x", isAll ? { min: all[0], max: all.at(-1) } : { min: low, max: low + width });
    }
    queueMicrotask(() => { // once the new scale is in force
      if (current !== null) move(current);
      holder.setAttribute("aria-valuetext", `steps ${seen[0]} to ${seen.at(-1)} are shown`);
    });
  }

  function key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const { min, max } = plot.scales.x;
    const seen = places.filter((place) => steps[place] >= min && steps[place] <= max);
    const by = { ArrowLeft: -1, ArrowRight: 1, PageDown: -Math.ceil(seen.length / 10), PageUp: Math.ceil(seen.length / 10), Home: -seen.length, End: seen.length }[event.key];
    const cursor = plot.cursor.idx ?? null;
    if (by && seen.length) {
      const at = cursor === null ? (by < 0 ? seen.length : -1) : seen.filter((place) => place < cursor).length;
      move(seen[Math.max(0, Math.min(seen.length - 1, at + by))]);
    } else if (event.key in ZOOMS) zoom(ZOOMS[event.key]);
    else if (event.key === "Enter" && cursor !== null) onStep?.(steps[cursor]);
    else if (event.key === "Escape") holder.blur();
    else return;
    event.preventDefault();
  }

  function leave(event) {
    current = null;
    if (!event.relatedTarget?.classList.contains("plot")) move(null); // another chart goes on from the same step
  }

  holder.setAttribute("aria-valuemin", steps[0]);
  holder.setAttribute("aria-valuemax", steps.at(-1));
  say(places.at(-1));
  holder.addEventListener("keydown", key);
  holder.addEventListener("blur", leave);
  return {
    /** The step at which the cursor was put by key; null if there is none. */
    step: () => (current === null ? null : steps[current]),
    /** Takes the focus, and the cursor to a step if it is not null. */
    resume(step) {
      holder.focus({ preventScroll: true });
      current = step === null ? null : steps.indexOf(step);
    },
    /** Puts the cursor back at its step, in a chart of another size. */
    stay: () => current !== null && move(current),
    end: () => holder.removeEventListener("blur", leave),
  };
}

/** The mark of a run: its colour and dashes. */
export function runMark(index) {
  return swatch(runColor(index), dashes(0, index));
}

/** A small square of a colour, or a line with dashes. */
function swatch(color, dash) {
  const node = el("i", { class: "swatch" });
  node.style.background = color;
  if (dash.length) {
    let end = 0;
    const stops = dash.map((length, place) => `${place % 2 ? "transparent" : color} ${end}px ${(end += length)}px`);
    node.classList.add("dashed");
    node.style.background = `repeating-linear-gradient(90deg, ${stops.join(", ")})`;
    node.style.width = `${Math.max(20, end)}px`;
  }
  return node;
}
