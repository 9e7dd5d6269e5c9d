// The page of one run.

import { Alerts } from "./alerts.js";
import { ask } from "./ask.js";
import { decimalAxis, linearAxis, upwardAxis } from "./axes.js";
import { Column } from "./column.js";
import { EventStrip } from "./event_strip.js";
import { LayerStrip } from "./layer_strip.js";
import { bandOf, isSame, lineOf } from "./line.js";
import { loadPlotly } from "./plot.js";
import { RangesChart } from "./ranges_chart.js";
import { RunHeader } from "./run_header.js";
import { ScaleStrip } from "./scale_strip.js";
import { stepsPerSecond } from "./state.js";
import { Strip } from "./strip.js";
import { countText, element, runAddress, say } from "./text.js";
import { View } from "./view.js";

/** The curves that runs have; a page makes a Strip of each. end: of a run, the number that is not its last step's. */
export const CURVES = {
  loss: {
    title: "Loss",
    noun: "loss",
    height: 260,
    axis: linearAxis,
    logAxis: decimalAxis,
    canBeLog: true,
    hasTrend: true,
  },
  grad_norm: {
    title: "Gradient norm",
    noun: "gradient norm",
    note: "True 2-norm before clipping.",
    axis: decimalAxis,
    hasTrend: true,
  },
  steps_per_s: {
    title: "Steps a second",
    note: "The number is the median of the last 100 steps.",
    axis: upwardAxis,
    hasTrend: true,
    of: "seconds",
    change: perSecond,
    end: stepsPerSecond,
  },
  count_per_s: {
    title: "Count a second",
    note: "Tokens, samples or micro-batches: the unit of the loss's count. The number is that of the last step.",
    axis: upwardAxis,
    hasTrend: true,
  },
  memory_mib: { title: "Memory", note: "MiB, the most so far.", axis: linearAxis },
};

function perSecond(seconds) {
  return seconds > 0 ? 1 / seconds : null;
}

export function runPage(page, name) {
  document.title = `${name}: halfstep watch`;
  const view = new View();
  const makeStrip = ([key, curve]) => [key, new Strip(view, { name: key, ...curve })];
  const strips = Object.fromEntries(Object.entries(CURVES).map(makeStrip));
  const events = new EventStrip(view);
  const scale = new ScaleStrip(view);
  const layers = new LayerStrip(view);
  const { loss, grad_norm, steps_per_s, count_per_s, memory_mib } = strips;
  const charts = [events, loss, grad_norm, scale, steps_per_s, count_per_s, memory_mib, layers];
  for (const chart of [count_per_s, memory_mib, layers]) chart.node.hidden = true;
  const golden = element("p", { class: "note", hidden: "" }, element("i", { class: "swatch golden" }), " golden band");
  loss.gutter.append(golden);
  let askNow = () => {};
  let rank = null;
  const column = new Column(view, charts, () => askNow());
  const header = new RunHeader(name, (chosen) => {
    rank = chosen;
    askNow();
  });
  const alerts = new Alerts(view, column.node);
  const ranges = new RangesChart();
  const progress = element("p", { class: "note" });
  const below = element("div", { class: "strips" }, ranges.node);
  const parts = [header.node, progress, alerts.top, column.node, below, alerts.node];
  page.replaceChildren(...parts);
  let isKnown = false;

  function show(data) {
    if (!isKnown) page.replaceChildren(...parts);
    isKnown = true;
    header.show(data.run, data.alerts);
    say(progress, progressText(data));
    column.node.hidden = !data.run.num_steps;
    // An alert may stand at a step that never ended.
    const last = Math.max(data.run.last_step, ...data.alerts.map((alert) => alert.step));
    view.whole = [data.run.first_step, last];
    const items = alerts.show(data.alerts, data.events ?? [], data.run.ranks?.length > 1);
    const lanes = events.show(items);
    const { series } = data;
    for (const [key, strip] of Object.entries(strips)) {
      strip.lines = [{ ...lineOf(series[strip.of ?? key], strip.change, strip.end?.(data.run)), color: "line" }];
      if (!view.wanted) strip.suit(data.run.num_steps);
    }
    loss.band = bandOf(data.golden);
    golden.hidden = !loss.band;
    scale.lines = [{ ...lineOf(series.scale), color: "line" }];
    scale.marks = { skips: data.skips, replays: data.replays };
    count_per_s.node.hidden = isSame(count_per_s.lines[0], steps_per_s.lines[0]);
    memory_mib.node.hidden = !memory_mib.lines[0].steps.length;
    layers.node.hidden = !data.layers;
    if (data.layers) layers.show(data.layers);
    for (const chart of charts) if (chart !== events) chart.lanes = lanes;
    ranges.show(data.ranges ?? null);
    column.draw();
  }

  function address() {
    const query = new URLSearchParams({ points: column.points });
    if (rank !== null) query.set("rank", rank);
    if (view.wanted) {
      const [first, last] = view.wanted;
      query.set("first", first);
      query.set("last", last);
    }
    return { run: `${runAddress(name)}.json?${query}` };
  }

  loadPlotly().then(() => {
    column.draw();
    ranges.draw();
  });
  /** Whether the run never was there. */
  function gone(line) {
    if (isKnown) header.showGone(line);
    else {
      header.showMissing(line);
      page.replaceChildren(header.node, element("p", {}, element("a", { href: "/" }, "See all runs")));
    }
    return !isKnown;
  }

  askNow = ask(address, (_, data) => show(data), (_, line) => gone(line));
}

function progressText({ is_complete, run }) {
  if (!is_complete) return `Reading the log: ${countText(run.num_steps, "step")} so far.`;
  return run.num_steps ? "" : "The charts begin with the first step.";
}
