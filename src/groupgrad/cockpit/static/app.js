// Starts the page: reads the runs, shows the page of the address, and asks for what is new while a run is live.
import { columnsOf, swatch } from "./charts.js";
import { el, fill, runColor } from "./dom.js";
import { overview } from "./overview.js";
import { rolloutsPage } from "./rollouts.js";
import { makeSource } from "./source.js";

const POLL_MS = 3000;

const source = makeSource();
const state = { runs: [], smoothing: 0, shade: "logprobs" };
const main = document.getElementById("main");
const top_ = document.getElementById("top");
let page = null;
let shown = "";

async function readMetrics(run) {
  const answer = await source.metrics(run.index, run.next);
  if (answer.reset) run.lines = [];
  run.lines.push(...answer.lines);
  run.next = answer.next;
  if (answer.lines.length || answer.reset) run.columns = columnsOf(run.lines);
  return answer.lines.length > 0;
}

function address() {
  const [path, query = ""] = location.hash.replace(/^#/, "").split("?");
  return { name: path === "/rollouts" ? "rollouts" : "overview", query: Object.fromEntries(new URLSearchParams(query)) };
}

function go(query, { replace = false } = {}) {
  const hash = `#/rollouts?${new URLSearchParams(query)}`;
  if (replace) {
    history.replaceState(null, "", hash);
    show();
  } else {
    location.hash = hash;
  }
}

function drawTop(name) {
  const tab = (to, text) => el("a", { href: to, "aria-current": name === text.toLowerCase() ? "page" : null }, text);
  const runs = state.runs.map((run) => {
    const box = el("input", { type: "checkbox", onchange: () => {
      run.shown = box.checked || state.runs.filter((other) => other.shown).length === 1;
      box.checked = run.shown;
      page?.update();
    } });
    box.checked = run.shown;
    return el("label", { class: "run", title: run.summary.path }, state.runs.length > 1 && box, swatch(runColor(run.index)), run.name, el("small", { class: `state ${run.summary.state}` }, run.summary.state));
  });
  fill(top_, el("strong", { class: "brand" }, "groupgrad"), el("nav", { "aria-label": "Pages" }, tab("#/", "Overview"), tab("#/rollouts", "Rollouts")), el("div", { class: "runs" }, runs));
}

function show() {
  const { name, query } = address();
  drawTop(name);
  if (name === "rollouts" && shown === "rollouts" && page.retarget(query)) return;
  page?.dispose();
  shown = name;
  page = name === "rollouts"
    ? rolloutsPage(state, query, { source, go })
    : overview(state, { openStep: (run, step) => go({ run, first_step: step, last_step: step }) });
  fill(main, page.node);
  document.title = `groupgrad · ${state.runs.map((run) => run.name).join(", ")}`;
}

async function poll() {
  let isNew = false;
  for (const run of state.runs.filter((one) => one.summary.state === "running")) {
    try {
      const more = await readMetrics(run);
      if (more) {
        run.summary = await source.summary(run.index);
        isNew = true;
      }
      document.body.classList.remove("offline");
    } catch {
      document.body.classList.add("offline");
    }
  }
  if (isNew && !document.hidden) {
    drawTop(address().name);
    page.update();
  }
}

async function start() {
  try {
    const runs = await source.runs();
    state.runs = await Promise.all(runs.map(async ({ name, path, state: now }, index) => {
      const summary = { name, path, state: now, config: {}, events: [], advice: [] };
      const run = { index, name, summary, shown: true, lines: [], next: "0", columns: columnsOf([]) };
      const whole = Promise.all([readMetrics(run), source.summary(index).then((found) => { run.summary = found; })]);
      if (address().name === "overview") await whole;
      else whole.then(() => shown === "overview" && page.update());  // the list of rollouts does without
      return run;
    }));
  } catch (error) {
    fill(main, el("p", { class: "bad" }, `The runs cannot be read: ${error.message}`));
    return;
  }
  addEventListener("hashchange", show);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => page?.update());
  show();
  document.body.dataset.ready = "yes";
  if (source.live) setInterval(poll, POLL_MS);
}

start();
