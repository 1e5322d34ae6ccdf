// Starts the page: reads the runs, shows the page of the address, and asks for what is new while a run is live.
import { columnsOf, runMark } from "./charts.js";
import { el, fill } from "./dom.js";
import { overview } from "./overview.js";
import { rolloutsPage } from "./rollouts.js";
import { makeSource } from "./source.js";
import { sweepPage } from "./sweep.js";

const POLL_MS = 3000;

const source = makeSource();
const state = { runs: [], sweeps: [], smoothing: 0, shade: "logprobs" };
const main = document.getElementById("main");
const top_ = document.getElementById("top");
let page = null;
let shown = "";
let heading = "";
let isPolling = false;

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
  const known = [state.runs.length && "/rollouts", state.sweeps.length && "/sweep"];
  const parts = Object.fromEntries(new URLSearchParams(query));
  if (parts.run !== undefined) parts.run = indexOf(parts.run);
  return { name: known.includes(path) ? path.slice(1) : "overview", query: parts };
}

/** What names a run in an address, also when other runs are shown beside it: its name, or its path if names are equal. */
function keyOf(run) {
  return state.runs.some((other) => other !== run && other.name === run.name) ? run.summary.path : run.name;
}

/** The index of a run by its name or path; addresses of earlier releases have the index itself. -1 for none. */
function indexOf(key) {
  const found = state.runs.find((run) => keyOf(run) === key) ?? state.runs.find((run) => run.summary.path === key);
  return found ? found.index : key in state.runs && /^\d+$/.test(key) ? Number(key) : -1;
}

/** The address of a selection of rollouts. */
function addressOf(query) {
  const run = state.runs[query.run ?? 0];
  return `#/rollouts?${new URLSearchParams({ ...query, ...(run && { run: keyOf(run) }) })}`;
}

/** Goes to a selection at once: until the event of a changed address came, a form of the page that is left could still be used. */
function go(query, { replace = false } = {}) {
  const hash = addressOf(query);
  const isNew = !replace && hash !== location.hash;
  if (isNew) history.pushState(null, "", hash);
  else history.replaceState(null, "", hash);
  show(isNew);
}

function drawTop(name) {
  const runsNow = state.runs.filter((run) => run.summary.state !== "deleted");
  const text = JSON.stringify([name, runsNow.map((run) => [run.name, run.summary.state, run.shown])]);
  if (text === heading) return; // so that the focus stays where it is
  heading = text;
  const tab = (to, text) => el("a", { href: to, "aria-current": name === text.toLowerCase() ? "page" : null }, text);
  const runs = runsNow.map((run) => {
    const box = el("input", { type: "checkbox", onchange: () => {
      run.shown = box.checked || runsNow.filter((other) => other.shown).length === 1;
      box.checked = run.shown;
      page?.update();
    } });
    box.checked = run.shown;
    return el("label", { class: "run", title: run.summary.path }, runsNow.length > 1 && box, runMark(run.index), run.name, el("small", { class: `state ${run.summary.state}` }, run.summary.state));
  });
  const tabs = [tab("#/", "Overview"), tab("#/rollouts", "Rollouts"), state.sweeps.length > 0 && tab("#/sweep", "Sweep")];
  fill(top_, el("strong", { class: "brand" }, "groupgrad"), el("nav", { "aria-label": "Pages" }, tabs), el("div", { class: "runs" }, runs));
}

/** What stands in the place of the rollouts of a run that the page does not have, or not yet. */
function noRun() {
  const text = "This page has no run of the name that the address has: it was not given to groupgrad view, or is deleted, or two runs have this name.";
  return { node: el("p", { class: "bad", role: "alert" }, text), update: () => show(), dispose: () => {}, retarget: () => false };
}

function makePage(name, query) {
  if (name === "rollouts" && query.run === -1) return noRun();
  if (name === "sweep") return sweepPage(state, { source, addressOf });
  if (name === "rollouts") return rolloutsPage(state, query, { source, go, addressOf });
  return overview(state, { source, openStep: (run, step) => go({ run, first_step: step, last_step: step }) });
}

/** Shows the page of the address; `isNew` if the address has just changed. */
function show(isNew) {
  const { name, query } = address();
  drawTop(name);
  if (name === "rollouts" && shown === "rollouts" && page.retarget(query)) return;
  page?.dispose();
  shown = document.body.dataset.page = name;
  page = makePage(name, query);
  fill(main, page.node);
  if (isNew) main.focus({ preventScroll: true }); // what had the focus is gone
  document.title = `groupgrad · ${state.runs.map((run) => run.name).join(", ")}`;
}

/** A run of an answer of the server; its metrics and summary are read by `readRun`. */
function newRun({ name, path, state: now }, index) {
  const summary = { name, path, state: now, step: 0, config: {}, events: [], advice: [] };
  return { index, name, summary, shown: true, lines: [], next: "0", columns: columnsOf([]), size: null };
}

async function readRun(run, { name, state: now, size, step }) {
  if (now !== "deleted") {
    await Promise.all([readMetrics(run), source.summary(run.index).then((found) => { run.summary = found; })]);
  }
  Object.assign(run, { name, size, shown: run.shown && now !== "deleted" });
  Object.assign(run.summary, { state: now, step });
}

/** Reads a run; one that cannot be read says why and does not hide the others. */
async function tryToRead(run, found) {
  try {
    await readRun(run, found);
  } catch (error) {
    run.summary.events = [{ event: "error", step: 0, text: `This run cannot be read: ${error.message}` }];
  }
}

/** Reads what has changed: runs that have begun or made steps, that have new metrics, or whose state is another one. */
async function poll() {
  if (isPolling) return;
  isPolling = true;
  try {
    let isNew = false;
    let hasStepped = false;
    for (const [index, found] of (await source.runs()).entries()) {
      state.runs[index] ??= newRun(found, index);
      const run = state.runs[index];
      if (run.size === found.size && run.summary.state === found.state && run.name === found.name) {
        hasStepped ||= run.summary.step !== found.step;
        run.summary.step = found.step;
        continue;
      }
      await tryToRead(run, found);
      isNew = true;
    }
    await page.poll?.();
    document.body.classList.remove("offline");
    if (isNew && !document.hidden) {
      drawTop(address().name);
      page.update();
    } else if (hasStepped) {
      page.updateTiles?.();
    }
  } catch {
    document.body.classList.add("offline");
  } finally {
    isPolling = false;
  }
}

async function start() {
  isPolling = true; // until all runs have been read
  async function readAll() {
    await Promise.all(state.runs.map((run, index) => tryToRead(run, found[index])));
    isPolling = false;
  }
  let found;
  try {
    [found, state.sweeps] = await Promise.all([source.runs(), source.sweeps()]);
    state.runs = found.map(newRun);
    if (address().name === "overview") await readAll();
  } catch (error) {
    fill(main, el("p", { class: "bad" }, `The runs cannot be read: ${error.message}`));
    return;
  }
  addEventListener("hashchange", () => show(true));
  document.querySelector(".skip")?.addEventListener("click", (event) => {
    event.preventDefault(); // its address would be that of another page
    main.focus();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => page?.update());
  show();
  document.body.dataset.ready = "yes";
  if (isPolling) { // another page shows its rows before the metrics are read
    await page.loaded;
    await readAll();
    if (shown === "overview") page.update();
  }
  if (source.live) setInterval(poll, POLL_MS);
}

start();
