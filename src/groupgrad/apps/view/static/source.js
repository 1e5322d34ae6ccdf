// Where the page gets its data: from the server, or from a report that holds all of it.

/** The data of a report, if this page is one; else the server's. */
export function makeSource() {
  const embedded = document.getElementById("report");
  return embedded ? new ReportSource(JSON.parse(embedded.textContent)) : new ServerSource();
}

class ServerSource {
  live = true;

  async #get(path, query = {}) {
    const filled = Object.entries(query).filter(([, value]) => value !== "" && value !== null && value !== undefined);
    const answer = await fetch(`/api/${path}?${new URLSearchParams(filled)}`);
    if (!answer.ok) throw new Error(await answer.text());
    return answer.json();
  }

  runs() { return this.#get("runs"); }
  sweeps() { return this.#get("sweeps"); }
  summary(run) { return this.#get(`runs/${run}/summary`); }
  metrics(run, start) { return this.#get(`runs/${run}/metrics`, { start }); }
  rollouts(run, query) { return this.#get(`runs/${run}/rollouts`, query); }
  evaluations(run, against) { return this.#get(`runs/${run}/evaluations`, { against }); }
  group(run, step, group, phase) { return this.#get(`runs/${run}/group`, { step, group, phase }); }
  async command(sweep, command) {
    const answer = await fetch(`/api/sweeps/${sweep}/commands`, {
      method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(command),
    });
    if (!answer.ok) throw new Error(await answer.text());
    return answer.json();
  }
  image(run, name) { return `/api/runs/${run}/images/${encodeURIComponent(name)}`; }
}

class ReportSource {
  live = false;

  constructor(report) { this.report = report; }

  async runs() { return this.report.runs; }
  async sweeps() { return this.report.sweeps ?? []; }
  async summary(run) { return this.report.runs[run]; }
  async metrics(run) { return { lines: this.report.runs[run].metrics, next: "0", reset: true }; }
  /** A report has comparisons with its first run alone. */
  async evaluations(run, against) { return this.report.runs[run].evaluations[against ?? "own"] ?? []; }
  async group(run, step, group, phase = "train") {
    return { rows: this.report.runs[run].rollouts.filter((row) => row.step === step && row.group === group && (row.phase ?? "train") === phase) };
  }
  image(run, name) { return this.report.runs[run].images[name] ?? null; }

  async rollouts(run, query) {
    const { rollouts, facets } = this.report.runs[run];
    const pattern = query.text ? textPattern(query.text) : null;
    const found = rollouts.filter((row) => matches(row, query, pattern)).map((row) => ({ ...row, ...row.head, tools: toolNames(row).join("\n") }));
    found.sort(inOrder(query.sort ?? "step", query.order === "ascending" ? 1 : -1));
    const offset = query.offset ?? 0;
    const isChosen = (row) => row.step === Number(query.chosen_step) && row.row === Number(query.chosen_row) && (row.phase ?? "train") === (query.chosen_phase ?? "train");
    return { place: found.findIndex(isChosen), total: found.length, rows: found.slice(offset, offset + (query.limit ?? 100)), complete: true, facets };
  }
}

/** Compares two rows by a column, rows without a value last; equal ones as the server does (`selection.py`). */
function inOrder(column, sign) {
  const compare = (a, b) => (a < b ? -1 : a > b ? 1 : 0);
  const isMissing = (row) => (row[column] ?? null) === null;
  const phase = (row) => row.phase ?? "train";
  return (a, b) =>
    isMissing(a) - isMissing(b) || sign * compare(a[column], b[column]) || a.step - b.step ||
    (phase(a) !== "train") - (phase(b) !== "train") || compare(phase(a), phase(b)) || a.row - b.row;
}

function toolNames(row) {
  return [...new Set((row.tool_calls ?? []).map((call) => call.name))].sort();
}

/** A text as it is sought: any white space matches any white space, and case does not matter, as in `selection.py`. */
function textPattern(text) {
  const space = "[ \\t\\n\\x0b\\f\\r]+";
  const pieces = text.split(new RegExp(space)).map((piece) => piece.replace(/[\\^$.*+?()[\]{}|/]/g, "\\$&"));
  return new RegExp(pieces.join(space), "iu");
}

function matches(row, query, pattern) {
  const set = (name) => query[name] !== undefined && query[name] !== null && query[name] !== "";
  const reward = row[set("reward") ? `reward/${query.reward}` : "reward"];
  return (
    (!set("first_step") || row.step >= Number(query.first_step)) &&
    (!set("last_step") || row.step <= Number(query.last_step)) &&
    (!set("min_reward") || (reward !== null && reward >= Number(query.min_reward))) &&
    (!set("max_reward") || (reward !== null && reward <= Number(query.max_reward))) &&
    (!set("finish_reason") || row.finish_reason === query.finish_reason) &&
    (!set("prompt_id") || row.prompt_id === query.prompt_id) &&
    (!set("phase") || (row.phase ?? "train") === query.phase) &&
    (!set("tool") || toolNames(row).includes(query.tool)) &&
    (!pattern || (row.words ?? [row.prompt, row.completion]).some((words) => pattern.test(words)))
  );
}
