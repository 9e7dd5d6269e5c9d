// Several runs in one chart a metric, over one axis.

import { ask } from "./ask.js";
import { binaryAxis } from "./axes.js";
import { Column } from "./column.js";
import { bandOf, isSame, lineOf, valueAt } from "./line.js";
import { loadPlotly } from "./plot.js";
import { CURVES } from "./run_page.js";
import { setState, stateMark } from "./state.js";
import { MANY, Strip } from "./strip.js";
import { button, countText, element, runAddress, say, scaleText } from "./text.js";
import { View } from "./view.js";

const METRICS = {
  ...CURVES,
  scale: { title: "Loss scale", axis: binaryAxis, format: scaleText, shape: "hv" },
};
const ORDER = ["loss", "grad_norm", "scale", "steps_per_s", "count_per_s", "memory_mib"];
const NUM_COLORS = 10;
const MOST_HEIGHT = 500; // of the chart of losses, whose legend shows all runs
const MOST_POINTS = 8000; // of all lines of a chart together

class ComparedStrip extends Strip {
  isCompared = true;
  hidden = new Set();
  all = []; // lines, the hidden ones too

  show(lines, toggle) {
    const names = lines.map((line) => line.name).join("\n");
    if (names !== this.all.map((line) => line.name).join("\n")) this.#makeLegend(lines, toggle);
    this.all = lines;
    this.lines = lines.filter((line) => !this.hidden.has(line.name));
  }

  filter() {
    this.lines = this.all.filter((line) => !this.hidden.has(line.name));
    for (const row of this.values.children) row.ariaPressed = String(!this.hidden.has(row.dataset.run));
  }

  #makeLegend(lines, toggle) {
    const rows = lines.map((line) => {
      const { name } = line;
      const isShown = String(!this.hidden.has(name));
      const attributes = { class: "key", "aria-pressed": isShown, "data-run": name, title: name };
      const row = button("", () => toggle(name), attributes);
      row.append(swatch(line), element("span", { class: "run" }, name), element("span", { class: "value" }));
      return row;
    });
    this.values.replaceChildren(...rows);
    this.values.classList.add("legend");
    this.values.classList.toggle("many", lines.length > MANY);
  }

  showValues(step) {
    this.all.forEach((line, i) => say(this.values.children[i].lastChild, this.format(valueAt(line, step))));
  }
}

function areSame(counts, speeds) {
  return counts.every((line) => isSame(line, speeds.find((one) => one.name === line.name) ?? line));
}

function swatch({ color: paint, dash }) {
  return element("i", { class: `swatch ${paint}${dash ? " dashed" : ""}`, "aria-hidden": "true" });
}

export function comparePage(page, names) {
  document.title = "compare: halfstep watch";
  const all = [...new Set(names)];
  const look = (name, i) => ({ name, color: `run-${i % NUM_COLORS}`, dash: i < NUM_COLORS ? undefined : "dash" });
  const looks = new Map(all.map((name, i) => [name, look(name, i)]));
  const view = new View();
  const strips = ORDER.map((key) => new ComparedStrip(view, { name: key, ...METRICS[key] }));
  const hidden = new Set();
  for (const strip of strips) strip.hidden = hidden;
  const speed = strips.find((strip) => strip.name === "steps_per_s");
  const counts = strips.find((strip) => strip.name === "count_per_s");
  const memory = strips.find((strip) => strip.name === "memory_mib");
  for (const strip of [counts, memory]) strip.node.hidden = true;
  let askNow = () => {};
  const column = new Column(view, strips, () => askNow());
  const title = element("h1", {}, all.length < 2 ? "Nothing to compare" : `${all.length} runs compared`);
  const news = element("p", { class: "note bad" });
  const list = element("ul", { class: "compared" });
  const marks = new Map(all.map((name) => [name, stateMark()]));
  for (const name of all) {
    const link = element("a", { href: runAddress(name) }, name);
    list.append(element("li", { "data-run": name }, swatch(looks.get(name)), link, marks.get(name)));
  }
  const home = element("a", { href: "/" }, "all runs");
  const header = element("header", {}, element("p", { class: "eyebrow" }, "halfstep watch ", home), title, news, list);
  page.replaceChildren(header, column.node);
  if (all.length < 2) {
    say(news, "Mark two runs in the list of runs, and press compare.");
    column.node.hidden = true;
  }
  const left = new Set(all);

  function toggle(name) {
    if (hidden.has(name)) hidden.delete(name);
    else hidden.add(name);
    for (const strip of strips) strip.filter();
    column.draw();
  }

  function drop(names) {
    for (const name of names) {
      left.delete(name);
      setState(marks.get(name), "deleted", "");
    }
    const lost = all.filter((name) => !left.has(name));
    if (lost.length) say(news, `${countText(lost.length, "run")} not there any more: ${lost.join(", ")}.`);
  }

  function show(key, data) {
    const strip = strips.find((one) => one.name === key);
    for (const run of data.runs) setState(marks.get(run.name), run.state, run.why);
    drop(all.filter((name) => left.has(name) && !(name in data.series)));
    const steps = data.runs.filter((run) => run.last_step !== null);
    view.whole = [Math.min(...steps.map((run) => run.first_step)), Math.max(...steps.map((run) => run.last_step))];
    const kept = all.filter((name) => name in data.series);
    const ends = new Map(data.runs.map((run) => [run.name, strip.end?.(run)]));
    const line = (name) => lineOf(data.series[name], strip.change, ends.get(name));
    strip.show(kept.map((name) => ({ ...looks.get(name), ...line(name) })), toggle);
    if (!view.wanted) strip.suit();
    if (strip === speed || strip === counts) counts.node.hidden = areSame(counts.all, speed.all);
    if (strip === memory) memory.node.hidden = memory.all.every((line) => !line.steps.length);
    if (key === "loss") {
      strip.band = bandOf(data.golden);
      strip.setHeight(Math.min(MOST_HEIGHT, Math.max(METRICS.loss.height, 60 + 21 * kept.length)));
    }
    column.draw();
  }

  function addresses() {
    const points = Math.min(column.points, Math.max(200, Math.round(MOST_POINTS / left.size)));
    const asked = {};
    if (left.size === 0 || all.length < 2) return asked;
    // What is hidden may have to be shown.
    for (const strip of strips.filter((one) => one.isNear || (one.node.hidden && speed.isNear))) {
      const query = new URLSearchParams([...left].map((name) => ["run", name]));
      query.set("metric", strip.of ?? strip.name);
      query.set("points", points);
      if (view.wanted) {
        query.set("first", view.wanted[0]);
        query.set("last", view.wanted[1]);
      }
      asked[strip.name] = `/compare.json?${query}`;
    }
    return asked;
  }

  async function gone() {
    const answer = await fetch("/runs.json", { cache: "no-store" });
    if (!answer.ok) return;
    const { runs } = await answer.json();
    const there = new Set(runs.map((run) => run.name));
    drop([...left].filter((name) => !there.has(name)));
  }

  loadPlotly().then(() => column.draw());
  askNow = ask(addresses, show, gone);
}
