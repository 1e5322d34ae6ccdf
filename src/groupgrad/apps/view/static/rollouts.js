// The page of rollouts: filters, the list, and a group side by side.
import { contentText, counted, duration, el, fill, plainText, short } from "./dom.js";
import { SHADES, legend, tokenBlock } from "./tokens.js";
import { VirtualList } from "./virtual.js";

const FILTERS = ["text", "first_step", "last_step", "reward", "min_reward", "max_reward", "finish_reason", "tool", "phase", "prompt_id", "sort", "order"];

/** Characters of a tool call's arguments that are shown. */
const MAX_ARGUMENTS = 200;

/** The page. `query` are the parts of the address; `go(query)` changes them. Returns `{node, update, dispose}`. */
export function rolloutsPage(state, query, { source, go, addressOf }) {
  const run = Number(query.run ?? 0);
  const present = state.runs.filter((one) => one.summary.state !== "deleted");
  const count = el("p", { class: "count", role: "status" });
  const detail = el("section", { class: "detail", "aria-label": "Group" });
  const form = el("form", { class: "filters", role: "search", onsubmit: (event) => event.preventDefault() });
  const narrow = matchMedia("(max-width: 760px)").matches;
  let known = "";
  let drawings = 0;
  let isSought = query.step !== undefined && query.row !== undefined; // until the list shows the row of the address

  const list = new VirtualList({
    rowHeight: narrow ? 66 : 44,
    label: "Rollouts",
    load: async (offset, limit) => {
      const sought = isSought && offset === 0 ? query : null;
      const chosen = sought ? { chosen_step: query.step, chosen_row: query.row, chosen_phase: query.of } : {};
      const answer = await source.rollouts(run, { ...filters(), ...chosen, offset, limit });
      if (sought === query && answer.complete) isSought = false; // `query` changes when another row is opened
      fill(count, counted(answer.total, "rollout"), !answer.complete && ", more are being read ...", !source.live && " of this report");
      if (JSON.stringify(answer.facets) !== known) {
        known = JSON.stringify(answer.facets);
        drawFilters(answer.facets);
      }
      return answer;
    },
    draw: (node, row) => drawItem(node, row, query.sort),
    isOpen,
    isSame: (row, other) => JSON.stringify(place(row)) === JSON.stringify(place(other)),
    open: (row) => {
      const { of, ...rest } = query;
      go({ ...rest, run, ...place(row) });
    },
  });

  function isOpen(row) {
    return String(row.step) === query.step && String(row.row) === query.row && (row.phase ?? "train") === (query.of ?? "train");
  }

  function filters() {
    return Object.fromEntries(FILTERS.filter((name) => query[name]).map((name) => [name, query[name]]));
  }

  function change(name, value) {
    const next = { ...query, [name]: value };
    if (!value) delete next[name];
    go(next, { replace: true });
  }

  function runChoice() {
    const select = el("select", { name: "run", class: "wide", onchange: () => go({ run: select.value }) }, present.map((one) => el("option", { value: one.index }, one.name)));
    select.value = run;
    return el("label", {}, "Run", select);
  }

  function drawFilters(facets) {
    const field = (name, label, attributes = {}) => el("label", {}, label, el("input", { name, value: query[name] ?? "", onchange: (event) => change(name, event.target.value.trim()), ...attributes }));
    const choice = (name, label, options) => {
      const select = el("select", { name, onchange: (event) => change(name, event.target.value) }, options.map(([value, text]) => el("option", { value }, text)));
      select.value = query[name] ?? "";
      return el("label", {}, label, select);
    };
    const named = (names, first) => [["", first], ...names.map((name) => [name, name])];
    const number = { type: "number", step: "any" };
    const focused = document.activeElement?.name;
    const sorts = [["", "step"], ["reward", "reward"], ["advantage", "advantage"], ["num_tokens", "tokens"],
      ...facets.rewards.map((name) => [`reward/${name}`, `reward ${name}`]), ...facets.seconds.map((name) => [`seconds/${name}`, `seconds of ${name}`])];
    fill(form,
      present.length > 1 && runChoice(),
      field("text", "Text", { type: "search", placeholder: "in prompt or completion", class: "wide" }),
      field("first_step", "From step", { type: "number", placeholder: facets.steps[0] ?? "" }),
      field("last_step", "to", { type: "number", placeholder: facets.steps[1] ?? "" }),
      choice("reward", "Reward", named(facets.rewards, "weighted")),
      field("min_reward", "at least", number),
      field("max_reward", "at most", number),
      choice("finish_reason", "Ended by", named(facets.finish_reasons, "any")),
      facets.tools.length > 0 && choice("tool", "Tool", named(facets.tools, "any")),
      facets.phases.length > 1 && choice("phase", "Sampled in", [["", "all"], ...facets.phases.map((name) => [name, phaseName(name)])]),
      choice("sort", "Order by", sorts),
      choice("order", "", [["", "highest first"], ["ascending", "lowest first"]]),
      query.prompt_id && el("button", { type: "button", onclick: () => change("prompt_id", "") }, "× one prompt"),
      el("button", { type: "button", onclick: () => go({ run }) }, "Clear"));
    form.querySelector(`[name="${CSS.escape(focused ?? "-")}"]`)?.focus();
  }

  async function drawDetail() {
    const drawing = (drawings += 1);
    if (query.step === undefined || query.group === undefined) {
      fill(detail, el("p", { class: "quiet" }, "Choose a rollout to see its group, token by token."));
      return;
    }
    const { rows } = await source.group(run, Number(query.step), Number(query.group), query.of);
    if (drawing !== drawings) return; // another group was chosen meanwhile
    if (!rows.length) {
      fill(detail, el("p", { class: "quiet" }, `The rollouts of step ${query.step}, group ${query.group} are not stored.`));
      return;
    }
    const readout = el("output", { class: "readout" }, "Point at a token, or move with the arrow keys.");
    const by = state.shade;
    const select = el("select", { id: "shade", onchange: () => { state.shade = select.value; drawDetail(); } }, Object.entries(SHADES).map(([value, text]) => el("option", { value }, text)));
    select.value = by;
    const numShared = numPromptImages(rows);
    const cards = rows.map((row) => card(row, by, (text) => fill(readout, text), numShared));
    const others = present.filter((other) => other.index !== run);
    fill(detail,
      el("header", {},
        el("h2", {}, `Step ${query.step}, group ${query.group}${query.of ? `, ${phaseName(query.of)}` : ""}`),
        el("div", { class: "tools" }, el("label", { for: "shade" }, "Shade tokens by"), select, legend(by)),
        promptBlock(rows[0]),
        el("p", { class: "links" },
          link({ run, prompt_id: rows[0].prompt_id }, "this prompt in all steps"),
          others.map((other) => link({ run: other.index, prompt_id: rows[0].prompt_id }, `in ${other.name}`))),
        images(rows[0].images?.slice(0, numShared), "of the prompt")),
      el("div", { class: "cards" }, cards), readout);
    detail.dataset.shade = by;
    detail.scrollTop = 0;
    if (narrow) detail.scrollIntoView({ block: "start" });
  }

  function link(target, text) {
    return el("a", { href: addressOf(target) }, text);
  }

  function images(names, of) {
    const sources = (names ?? []).map((name) => source.image(run, name)).filter(Boolean);
    return sources.length > 0 && el("div", { class: "images" }, sources.map((src, place) => el("img", { src, alt: `image ${place + 1} ${of}`, loading: "lazy" })));
  }

  function card(row, by, say, numShared) {
    const rewards = Object.keys(row).filter((name) => name.startsWith("reward/"));
    const seconds = Object.entries(row).filter(([name, value]) => name.startsWith("seconds/") && value !== null);
    const sign = row.advantage > 0 ? "up" : row.advantage < 0 ? "down" : "";
    const chosen = String(row.row) === String(query.row);
    const given = argumentsOf(row);
    const extras = [["data", row.data], ["logged", row.extra]].filter(([, value]) => value);
    return el("article", { class: `card rollout${chosen ? " chosen" : ""}`, id: `row-${row.row}` },
      el("header", {},
        el("a", { class: "anchor", href: addressOf({ run, ...place(row) }), title: "link to this rollout" }, `row ${row.row}`),
        el("span", {}, "reward ", el("b", {}, short(row.reward))),
        el("span", { class: sign }, "advantage ", el("b", {}, `${row.advantage > 0 ? "+" : ""}${short(row.advantage)}`)),
        el("span", { class: row.finish_reason === "eos" ? "chip" : "chip warn" }, row.finish_reason),
        el("span", { class: "quiet" }, counted(row.num_tokens, "token"))),
      rewards.length > 1 && el("p", { class: "parts" }, rewards.map((name) => el("span", {}, name.slice(7), " ", el("b", {}, short(row[name]))))),
      (row.turn_advantages ?? row.turn_rewards ?? []).length > 1 && turns(row, rewards),
      row.problem && el("p", { class: "bad" }, row.problem),
      tokenBlock(row, by, say),
      images(row.images?.slice(numShared), `of row ${row.row}`),
      given.length > 0 && el("details", {}, el("summary", {}, `${counted(row.tool_calls.length, "tool call")}, ${duration(row.wait_s)} of waiting`),
        el("ul", {}, given.map((one, place) => callItem(row.tool_calls[place], one)))),
      row.is_messages && messages(row),
      (extras.length > 0 || seconds.length > 0) && el("details", {}, el("summary", {}, "data and rewards"),
        extras.map(([name, value]) => el("pre", {}, `${name}: ${pretty(value)}`)),
        seconds.map(([name, value]) => el("p", { class: "quiet" }, `${name.slice(8)} took ${duration(value)} for its rows`))));
  }

  function update() {
    if (list.node.scrollTop === 0) list.reset();
  }

  const node = el("div", { class: "rollouts" },
    form, el("div", { class: "columns" }, el("div", { class: "left" }, count, list.node), detail));
  drawFilters({ finish_reasons: [], tools: [], rewards: [], seconds: [], phases: [], steps: [] });
  drawDetail();
  return {
    node,
    update,
    /** Ends with the first rows, or without them if they cannot be read. */
    loaded: list.loaded,
    dispose: () => list.dispose(),
    /** Shows another group without a new list; false if the filters or the run are others. */
    retarget(next) {
      const same = Number(next.run ?? 0) === run && FILTERS.every((name) => (next[name] ?? "") === (query[name] ?? ""));
      if (same) {
        query = next;
        drawDetail();
        const current = list.row(list.current);
        if (query.row !== undefined && !(current && isOpen(current))) {
          isSought = true;
          list.current = -1; // another row is open now, whether the list has it or not
          list.reset();
        }
      }
      return same;
    },
  };
}

function promptBlock(row) {
  const text = plainText(row.prompt, row.is_messages);
  const long = text.length > 400;
  return el("details", { class: "prompt", open: !long }, el("summary", {}, "Prompt"), el("pre", {}, text));
}

/** The rewards and the advantage of each turn. */
function turns(row, names) {
  const count = (row.turn_rewards ?? row.turn_advantages).length;
  return el("ol", { class: "turns" }, Array.from({ length: count }, (_, turn) => {
    const given = (row.turn_rewards?.[turn] ?? []).map((value, place) => [names[place], value]).filter(([, value]) => value !== null);
    const advantage = row.turn_advantages?.[turn] ?? null;
    return el("li", {},
      given.map(([name, value]) => [el("span", {}, names.length > 1 ? `${name.slice(7)} ` : "reward ", el("b", {}, short(value))), " "]),
      advantage !== null && el("span", { class: advantage > 0 ? "up" : advantage < 0 ? "down" : "" }, "advantage ", el("b", {}, `${advantage > 0 ? "+" : ""}${short(advantage)}`)));
  }));
}

function callItem(call, given) {
  const text = typeof given === "string" ? given : JSON.stringify(given ?? null);
  const brief = text.length > MAX_ARGUMENTS ? `${text.slice(0, MAX_ARGUMENTS)} ...` : text;
  return el("li", { class: call.failed ? "bad" : "" },
    `${call.name} ${duration(call.seconds)}${call.timed_out ? ", out of time" : call.failed ? ", failed" : ""}`,
    (given ?? null) !== null && [" ", el("code", {}, brief)]);
}

/** What each tool call of a row was given, undefined where its messages do not say. A call that could not be read is answered,
 * but is not in its message; which of the turn's other calls have which arguments is not known then. */
function argumentsOf(row) {
  const parts = messagesOf(row);
  const found = [];
  parts.forEach(({ role, tool_calls: calls }, place) => {
    if (role !== "assistant") return;
    const others = parts.slice(place + 1);
    const end = others.findIndex((other) => other.role !== "tool");
    const numAnswers = end < 0 ? others.length : end;
    const named = Array.isArray(calls) ? calls : [];
    const isKnown = !numAnswers || numAnswers === named.length; // the last turn's answers may have had no room
    found.push(...(isKnown ? named : Array(numAnswers).fill({})));
  });
  return (row.tool_calls ?? []).map((call, place) => {
    const called = found[place]?.function ?? found[place];
    return called?.name === call.name ? called.arguments : undefined;
  });
}

/** The messages of a completion; none if it is a text. */
function messagesOf(row) {
  try {
    const parts = row.is_messages ? JSON.parse(row.completion) : [];
    return Array.isArray(parts) ? parts : [];
  } catch {
    return [];
  }
}

function messages(row) {
  const parts = messagesOf(row);
  if (!parts.length) return null;
  return el("details", {}, el("summary", {}, parts.length === 1 ? "as a message" : `as ${parts.length} messages`), parts.map((message) =>
    el("div", { class: `message ${message.role === "tool" ? "tool" : ""}` }, el("small", {}, message.role), el("pre", {}, contentText(message)))));
}

function pretty(value) {
  try {
    return JSON.stringify(JSON.parse(value), null, 1);
  } catch {
    return value;
  }
}

/** What names a row in the address; `of` only for a rollout of an evaluation. */
function place(row) {
  const of = row.phase && row.phase !== "train" ? { of: row.phase } : {};
  return { ...of, step: row.step, group: row.group, row: row.row };
}

function phaseName(phase) {
  return phase === "train" ? "training" : `evaluation ${phase}`;
}

/** How many of a row's first images are its prompt's. Files of earlier releases do not say: all, if all rows have the same. */
function numPromptImages(rows) {
  const names = rows.map((row) => String(row.images));
  return rows[0].prompt_images ?? (names.every((name) => name === names[0]) ? Infinity : 0);
}

/** The number that the list is ordered by, where an item does not show it anyway. */
function orderedBy(row, sort) {
  const value = row[sort];
  if (!sort || sort === "reward" || value === null || value === undefined) return "";
  if (sort.startsWith("seconds/")) return duration(value);
  return sort === "num_tokens" ? counted(value, "token") : `${sort} ${short(value, 2)}`;
}

function drawItem(node, row, sort) {
  if (!row) {
    node.classList.remove("held-out");
    fill(node, el("span", { class: "quiet" }, "..."));
    return;
  }
  const sign = row.advantage > 0 ? "up" : row.advantage < 0 ? "down" : "";
  const isHeldOut = (row.phase ?? "train") !== "train";
  node.classList.toggle("held-out", isHeldOut);
  const number = orderedBy(row, sort);
  fill(node,
    el("span", { class: "where" }, el("b", {}, row.step), ` · ${row.row}`),
    el("span", { class: `number ${sign}` }, short(row.reward, 2)),
    el("span", { class: "text" }, el("span", { class: "quiet" }, number && el("b", {}, `${number} · `), isHeldOut && el("b", {}, `${phaseName(row.phase)} · `), plainText(row.prompt, false)), el("span", {}, row.completion)),
    el("span", { class: row.finish_reason === "eos" ? "chip" : "chip warn" }, row.finish_reason));
}
