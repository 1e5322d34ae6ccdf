// The page of sweeps: the arms, the best one first, and the commands that can be given to each.
import { runMark } from "./charts.js";
import { el, fill, short } from "./dom.js";

const CAN = {
  stop: (arm) => arm.state === "waiting",
  resume: (arm) => ["stopped", "dropped", "failed"].includes(arm.state),
  clone: () => true,
  delete: () => true,
};

/** The page of all sweeps. Returns `{node, update, poll, dispose}`; `poll` reads them again. */
export function sweepPage(state, { source, addressOf }) {
  const node = el("div", { class: "sweeps" });
  const said = el("p", { class: "said", role: "status", "aria-live": "polite" });
  const dialog = el("dialog", { class: "card", onclose: () => draw() });
  const body = el("div");
  let drawn = "";
  const pending = new Set(); // stops and resumes that were given, until the table shows what came of them
  node.append(said, body, dialog);

  function draw() {
    const text = JSON.stringify([state.sweeps, state.runs.map((run) => run.summary.path)]);
    if (text === drawn || dialog.open) return; // closing it gives the focus back to the button that has opened it
    drawn = text;
    const focused = document.activeElement?.dataset?.key;
    fill(body, state.sweeps.map((sweep, place) => sweepCard(state, sweep, addressOf, source.live ? (kind, arm) => ask(place, kind, arm) : null)));
    if (focused) body.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus();
  }

  async function poll() {
    state.sweeps = await source.sweeps();
    draw();
  }

  /** Gives a command. Returns why it was refused, or an empty text. */
  async function give(place, kind, arm, more = {}) {
    fill(said, `${kind} of ${arm.name} ...`);
    said.className = "said";
    try {
      const { text, refused } = await source.command(place, { kind, arm: arm.id, ...more });
      fill(said, text);
      said.classList.toggle("bad", refused);
      if (refused) return text;
    } catch (error) {
      fill(said, error.message);
      said.classList.add("bad");
      return error.message;
    } finally {
      await poll().catch(() => {}); // the page says itself that the server is gone; the command has been answered
    }
    return "";
  }

  function ask(place, kind, arm) {
    if (kind === "clone") askForClone(place, arm);
    else if (kind === "delete") askOnce(`Delete ${arm.name}, with its checkpoints and rollouts?`, "Delete", () => give(place, kind, arm));
    else giveOnce(place, kind, arm);
  }

  /** Gives a command without a form, unless it was given a moment ago. */
  async function giveOnce(place, kind, arm) {
    const key = [place, kind, arm.id].join(" ");
    if (pending.has(key)) return;
    pending.add(key);
    await give(place, kind, arm);
    pending.delete(key);
  }

  function askOnce(text, button, then) {
    openDialog(el("p", {}, text), button, then);
  }

  function askForClone(place, arm) {
    const changes = el("textarea", { id: "changes", rows: 4, cols: 44, placeholder: "learning_rate=2e-6", spellcheck: "false" });
    const weights = el("input", { type: "checkbox", id: "from-weights" });
    openDialog([
      el("h2", {}, `Clone ${arm.name}`),
      el("label", { for: "changes" }, "What the clone changes: KEY=VALUE, one a line"), changes,
      el("label", { class: "check", for: "from-weights" }, weights, "begin with the weights of its last turn"),
    ], "Clone", () => {
      const set = changes.value.split("\n").map((line) => line.trim()).filter(Boolean);
      return give(place, "clone", arm, { set, from_weights: weights.checked });
    });
  }

  function openDialog(content, button, then) {
    const problem = el("p", { class: "bad", role: "alert" });
    const progress = el("p", { class: "quiet", role: "status" });
    let isPending = false;
    const form = el("form", { method: "dialog", onsubmit: async (event) => {
      event.preventDefault();
      if (isPending) return; // Enter was pressed again
      isPending = true;
      fill(problem);
      fill(progress, "being checked ...");
      const refusal = await then(); // what was typed stays, to be mended
      fill(progress);
      isPending = false;
      if (refusal) fill(problem, refusal);
      else dialog.close();
    } }, content, progress, problem, el("p", { class: "buttons" }, el("button", { type: "submit" }, button), el("button", { type: "button", onclick: () => dialog.close() }, "Cancel")));
    fill(dialog, form);
    dialog.showModal();
  }

  draw();
  return { node, update: draw, poll, dispose: () => dialog.close() };
}

function sweepCard(state, sweep, addressOf, ask) {
  const share = sweep.all_steps ? (100 * sweep.steps) / sweep.all_steps : 0;
  const heads = ["no.", "arm", "state", "steps", sweep.metric, "behind the best by", ask && "commands"].filter(Boolean);
  return el("section", { class: "card sweep" },
    el("h2", {}, `Sweep ${sweep.name}`),
    el("p", { class: "quiet" }, `${short(sweep.steps)} steps, ${Math.round(share)} % of training all arms to their end; switching took ${short(100 * sweep.switch_share, 1)} % of the time`),
    el("p", { class: "quiet" }, `Arms in the race by ${sweep.metric}, the best first; below them, faint, those that were stopped, dropped or failed.`),
    sweep.note && el("p", {}, sweep.note),
    el("div", { class: "scroll" }, el("table", {},
      el("thead", {}, el("tr", {}, heads.map((head) => el("th", { scope: "col" }, head)))),
      el("tbody", {}, sweep.arms.map((arm) => armRow(state, sweep, arm, addressOf, ask))))),
    sweep.commands.length > 0 && el("details", { open: sweep.commands[0].state !== "done" }, el("summary", {}, "Commands"),
      el("ul", { class: "events" }, sweep.commands.map(commandItem))));
}

function armRow(state, sweep, arm, addressOf, ask) {
  const run = state.runs.find((other) => other.summary.path === arm.path);
  const name = run ? el("a", { href: addressOf({ run: run.index }), "data-key": `${sweep.path} ${arm.id}` }, arm.name) : arm.name;
  const buttons = ask && Object.keys(CAN).filter((kind) => CAN[kind](arm)).map((kind) =>
    el("button", { type: "button", "data-key": `${sweep.path} ${arm.id} ${kind}`, "aria-label": `${kind} arm ${arm.id}`, onclick: () => ask(kind, arm) }, kind));
  const inRace = ["waiting", "done"].includes(arm.state);
  const [word] = arm.shown_state.split(" ");
  const head = (text) => el("small", { class: "head" }, text); // shown on a phone, where the table's own heads are not
  return el("tr", { class: inRace ? null : "out" },
    el("td", {}, arm.id),
    el("th", { scope: "row" }, run && runMark(run.index), name, arm.parent && el("small", {}, ` of ${arm.parent}`)),
    el("td", {}, el("span", { class: `state ${word}` }, arm.shown_state), arm.state === "failed" && el("p", { class: "bad" }, arm.reason)),
    el("td", {}, head("steps"), arm.step || arm.max_steps ? `${arm.step}/${arm.max_steps ?? "?"}` : ""),
    el("td", { title: arm.compared ? `mean of steps ${arm.compared.join(" to ")}` : "" }, head(sweep.metric), short(arm.reward)),
    el("td", {}, arm.behind && !arm.behind.startsWith("ahead") && head("behind the best by"), arm.behind),
    ask && el("td", { class: "buttons" }, buttons));
}

function commandItem(command) {
  const changes = Object.entries(command.changes).map(([name, value]) => `${name}=${value}`).join(" ");
  return el("li", { class: `event ${command.state === "refused" ? "bad" : ""}` },
    el("span", { class: "quiet" }, command.state), el("b", {}, command.kind),
    el("span", {}, [command.arm, changes, command.from_weights && "from its weights", command.message].filter(Boolean).join(" · ")));
}
