// The list of runs.

import { ask } from "./ask.js";
import { severityOf, SEVERITIES } from "./severity.js";
import { setState, stateMark, stepsPerSecond } from "./state.js";
import { countText, element, numberText, runAddress, say, scaleText, setAge } from "./text.js";

const MOST_COMPARED = 20;
const COUNTED = ["failed", "lost", "stalled", "running"]; // states that the headline counts
const WITH_REASON = ["failed", "stalled", "lost", "empty", "reading"];
const NO_RUN = "No run yet. A run appears here when a Stepper with log= writes into this folder.";
const COLUMNS = {
  policy: ["policy", (run) => run.effective ?? run.policy ?? "–", "left"],
  last_step: ["step", (run) => numberText(run.last_step)],
  loss: ["loss", (run) => numberText(run.loss)],
  grad_norm: ["gradient norm", (run) => numberText(run.grad_norm)],
  scale: ["scale", (run) => scaleText(run.scale)],
  num_skipped: ["skips", (run) => numberText(run.num_skipped)],
  num_replays: ["replays", (run) => numberText(run.num_replays)],
  num_alerts: ["alerts", alertsText],
  seconds: ["steps/s", (run) => numberText(stepsPerSecond(run))],
};

export function runsPage(page) {
  const rows = new Map(); // of a run's name: its row
  const chosen = new Set();
  const title = element("h1", {}, "Runs");
  const folder = element("b");
  const label = "Filter runs by name, policy or state";
  const filter = element("input", { type: "search", placeholder: "Filter", "aria-label": label });
  const compare = element("a", { class: "compare" });
  const body = element("tbody");
  const empty = element("p", { class: "nothing", hidden: "" });
  const middle = Object.values(COLUMNS).map(([text, , side]) => [text, side ?? "right"]);
  const heads = [["", "left"], ["state", "left"], ["run", "left"], ...middle, ["updated", "right"]];
  const head = heads.map(([text, side]) => element("th", { class: side, scope: "col" }, text));
  head[0].append(element("span", { class: "unseen" }, "compare"));
  const table = element("table", { class: "runs" }, element("thead", {}, element("tr", {}, ...head)), body);
  page.replaceChildren(
    element("header", {}, element("p", { class: "eyebrow" }, "halfstep watch ", folder), title),
    element("div", { class: "bar" }, filter, compare),
    element("div", { class: "sheet" }, table, empty),
  );
  filter.addEventListener("input", () => show());
  let runs = null;

  function show() {
    if (runs === null) return;
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const shown = sorted(runs).filter((run) => {
      const text = [run.name, run.policy, run.effective, run.state, run.device].join(" ").toLowerCase();
      return words.every((word) => text.includes(word));
    });
    for (const run of shown) {
      if (!rows.has(run.name)) rows.set(run.name, makeRow(run.name, choose));
      fill(rows.get(run.name), run);
    }
    place(body, shown.map((run) => rows.get(run.name).node));
    table.hidden = shown.length === 0;
    empty.hidden = shown.length > 0;
    say(empty, runs.length ? "No run matches the filter." : NO_RUN);
    say(title, runs.length ? headline(runs) : "No runs");
    showCompare();
  }

  function choose(name, is) {
    if (is) chosen.add(name);
    else chosen.delete(name);
    showCompare();
  }

  function showCompare() {
    const names = runs.map((run) => run.name).filter((name) => chosen.has(name));
    const can = names.length >= 2 && names.length <= MOST_COMPARED;
    if (can) compare.href = `/compare?${new URLSearchParams(names.map((name) => ["run", name]))}`;
    else compare.removeAttribute("href");
    const cannot = names.length < 2 ? "Mark two runs to compare them" : `Compare at most ${MOST_COMPARED} runs`;
    say(compare, can ? `Compare ${names.length} runs` : cannot);
  }

  ask(
    () => ({ runs: "/runs.json" }),
    (_, data) => {
      runs = data.runs;
      say(folder, data.folder);
      document.title = `${data.folder}: halfstep watch`;
      const names = new Set(runs.map((run) => run.name));
      for (const name of rows.keys()) if (!names.has(name)) rows.delete(name);
      show();
    },
    (_, line) => say(title, line),
  );
}

/** As "18 runs: 4 failed, 1 running". */
function headline(runs) {
  const counts = COUNTED.map((state) => [runs.filter((run) => run.state === state).length, state]);
  const found = counts.filter(([count]) => count).map(([count, state]) => `${numberText(count)} ${state}`);
  return [countText(runs.length, "run"), found.join(", ")].filter(Boolean).join(": ");
}

/** With the sign of the worst one, where that is known. */
function alertsText({ num_alerts, worst }) {
  const sign = num_alerts && worst ? `${SEVERITIES[severityOf({ severity: worst })].sign} ` : "";
  return sign + numberText(num_alerts);
}

/** Running ones first, in an order that does not change from second to second; then the newest. */
function sorted(runs) {
  const rank = (run) => (run.state === "running" ? 0 : 1);
  const time = (run) => (run.state === "running" ? run.started : run.updated) ?? 0;
  return [...runs].sort((a, b) => rank(a) - rank(b) || time(b) - time(a) || a.name.localeCompare(b.name));
}

function makeRow(name, choose) {
  const box = element("input", { type: "checkbox", "aria-label": `Compare ${name}` });
  box.addEventListener("change", () => choose(name, box.checked));
  const state = stateMark();
  const why = element("span", { class: "note" });
  const age = element("time");
  const cells = Object.entries(COLUMNS).map(([key, [head, , side]]) => [
    key,
    element("td", { class: side ?? "right", "data-label": head, "data-key": key }),
  ]);
  const link = element("a", { href: runAddress(name) }, name);
  const node = element(
    "tr",
    {},
    element("td", { class: "box" }, element("label", {}, box)),
    element("td", { class: "left state-cell" }, state),
    element("td", { class: "left name" }, link, why),
    ...cells.map(([, cell]) => cell),
    element("td", { class: "right", "data-label": "updated" }, age),
  );
  return { node, state, why, age, cells: Object.fromEntries(cells) };
}

function fill(row, run) {
  row.node.dataset.run = run.name;
  setState(row.state, run.state, run.why);
  say(row.why, WITH_REASON.includes(run.state) ? (run.why ?? "") : "");
  row.why.title = row.why.textContent;
  for (const [key, [, text]] of Object.entries(COLUMNS)) {
    say(row.cells[key], text(run));
  }
  const severity = severityOf({ severity: run.worst ?? "warning" });
  for (const [word, look] of Object.entries(SEVERITIES)) {
    row.cells.num_alerts.classList.toggle(look.color, run.num_alerts > 0 && word === severity);
  }
  // What is not finite is a text in JSON.
  for (const key of ["loss", "grad_norm"]) row.cells[key].classList.toggle("bad", typeof run[key] === "string");
  setAge(row.age, run.updated);
}

/** Makes `nodes` the children of `parent`, and moves none that stands right: it keeps the focus. */
function place(parent, nodes) {
  const wanted = new Set(nodes);
  for (const child of [...parent.children]) if (!wanted.has(child)) child.remove();
  nodes.forEach((node, i) => {
    if (parent.children[i] !== node) parent.insertBefore(node, parent.children[i] ?? null);
  });
}
