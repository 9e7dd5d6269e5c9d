// The magnitudes of values, module by module, as `halfstep ranges` measured them: it has an axis of its own.

import { chartText, element, button, numberText, powerText, say, scaleText, shortName } from "./text.js";
import { axisStyle, baseLayout, color, draw, heatColors, heatLegend, onScheme, scheme } from "./plot.js";
import { isNarrow } from "./strip.js";

const TITLES = {
  activation: "activations",
  gradient: "gradients of outputs",
  "weight gradient": "gradients of weights",
  update: "weight updates",
};
const SCALED = ["gradient", "weight gradient"];
/** Exponents where a format rounds to zero, becomes subnormal, and has its largest number. */
const LIMITS = {
  fp16: { zero: -25, subnormal: -14, max: Math.log2(65504) },
  e5m2: { zero: -17, subnormal: -14, max: Math.log2(57344) },
  e4m3: { zero: -10, subnormal: -6, max: Math.log2(448) },
};
const LOWEST = -3; // log10 of the smallest share, in percent, that has a colour of its own
const TAIL = 12; // bins below the lowest limit; smaller values share the last one

export class RangesChart {
  #entry = null;
  #kind = null;
  #drawn = "";

  constructor() {
    this.kinds = element("div", { class: "buttons", role: "group", "aria-label": "Kind of values" });
    this.note = element("p", { class: "note" });
    this.value = element("p", { class: "note at" });
    this.plot = element("div", { class: "canvas" });
    const frame = element("div", { class: "plot" }, this.plot);
    const head = element("div", { class: "gutter" }, element("h2", { id: "chart-ranges" }, "Magnitudes by module"));
    head.append(this.note, this.kinds, heatLegend("0.001 %", "100 %"), this.value);
    const attributes = { class: "strip wide", "data-chart": "ranges", "aria-labelledby": "chart-ranges", hidden: "" };
    this.node = element("section", attributes, head, frame);
    frame.addEventListener("pointermove", (event) => this.#point(event));
    onScheme(() => this.draw());
    new ResizeObserver(() => this.draw()).observe(this.node);
  }

  /** Shows an entry of the kind "ranges"; null hides the chart. */
  show(entry) {
    this.node.hidden = entry === null;
    if (entry === null || JSON.stringify(entry) === JSON.stringify(this.#entry)) return;
    this.#entry = entry;
    const kinds = Object.keys(TITLES).filter((kind) => this.#rows(kind).length);
    if (!kinds.includes(this.#kind)) this.#kind = kinds[0] ?? null;
    this.kinds.replaceChildren(
      ...kinds.map((kind) => button(TITLES[kind], () => this.#choose(kind), { "data-kind": kind })),
    );
    this.draw();
  }

  #choose(kind) {
    this.#kind = kind;
    this.draw();
  }

  /** Without containers that hold exactly what a part of them holds. */
  #rows(kind) {
    const rows = this.#entry.modules.filter((row) => row.kind === kind && row.num_nonzero);
    const content = rows.map((row) => JSON.stringify([row.largest, row.exponents]));
    const isWithin = (name, outer) => name !== outer && (outer === "" || name.startsWith(`${outer}.`));
    return rows.filter((row, i) => {
      return !rows.some((other, j) => content[i] === content[j] && isWithin(other.module, row.module));
    });
  }

  draw() {
    if (this.node.hidden || !globalThis.Plotly || !this.plot.clientWidth || this.#kind === null) return;
    const key = JSON.stringify([this.#kind, this.#entry.step, this.#entry.time, scheme(), this.plot.clientWidth]);
    if (key === this.#drawn) return;
    this.#drawn = key;
    for (const one of this.kinds.children) one.ariaPressed = String(one.dataset.kind === this.#kind);
    const rows = this.#rows(this.#kind);
    const { scale, step } = this.#entry;
    const power = SCALED.includes(this.#kind) ? Math.round(Math.log2(Number(scale))) : 0;
    const name = commonest(rows.map((row) => row.format));
    const format = name in LIMITS ? name : "fp16";
    const limits = Object.entries(LIMITS[format]).map(([limit, at]) => [limit, at - power]);
    const bins = this.#bins(rows, limits);
    const height = rows.length > 40 ? 10 : rows.length > 12 ? 16 : 24;
    const layout = this.#layout(rows, bins, limits, height, name in LIMITS);
    this.node.style.setProperty("--height", `${layout.height}px`);
    this.cells = { rows, bins, margin: layout.margin, height: layout.height };
    draw(this.plot, [this.#heat(rows, bins)], layout);
    const what = `At step ${numberText(step)}: a cell is the share of a module's non-zero values of this magnitude.`;
    const whose = name in LIMITS ? `The limits are those of ${format}` : "The limits of fp16 stand for comparison";
    say(this.note, `${what} ${whose}${power ? ` at a loss scale of ${scaleText(scale)}` : ""}.`);
    say(this.value, "\u00a0");
  }

  #bins(rows, limits) {
    const exponents = rows.flatMap((row) => Object.keys(row.exponents).map(Number));
    const low = Math.max(Math.min(...exponents), Math.floor(limits[0][1]) - TAIL);
    const high = Math.max(...exponents);
    return Array.from({ length: Math.max(1, high - low + 1) }, (_, i) => low + i);
  }

  #heat(rows, bins) {
    const z = rows.map((row) => {
      const counts = countsOf(row, bins);
      return counts.map((count) => (count ? Math.log10((100 * count) / row.num_nonzero) : null));
    });
    const common = { type: "heatmap", xgap: 1, ygap: 1, showscale: false, hoverinfo: "skip", colorscale: heatColors() };
    return { ...common, x: bins.map((bin) => bin + 0.5), y: rows.map((_, i) => i), z, zmin: LOWEST, zmax: 2 };
  }

  #layout(rows, bins, limits, height, isOwn) {
    const margin = { l: isNarrow() ? 12 : 234, r: 16, t: 24, b: 28 };
    const layout = baseLayout(this.plot, margin.t + margin.b + height * rows.length, margin);
    const range = [Math.min(bins[0], limits[0][1]) - 1, Math.max(bins.at(-1) + 1, limits[2][1]) + 1];
    const every = range[1] - range[0] > 60 || isNarrow() ? 10 : 5;
    const ticks = [];
    for (let tick = Math.ceil(range[0] / every) * every; tick <= range[1]; tick += every) ticks.push(tick);
    const fixed = { ...axisStyle(), fixedrange: true, showgrid: false };
    layout.dragmode = false;
    layout.xaxis = { ...fixed, range, tickvals: ticks, ticktext: ticks.map(powerText) };
    layout.yaxis = {
      ...fixed,
      range: [rows.length - 0.5, -0.5],
      tickvals: rows.map((_, i) => i),
      ticktext: rows.map((row) => chartText(shortName(row.module || "(the model)", 34))),
      tickfont: { size: 11, color: color("soft") },
      showticklabels: !isNarrow(),
    };
    const paint = (limit) => color(limit === "subnormal" ? "open" : "bad");
    const whole = { yref: "paper", y0: 0, y1: 1 };
    layout.shapes = limits.map(([limit, at]) => {
      const line = { color: paint(limit), width: 1.5, dash: isOwn ? "solid" : "dot" };
      return { ...whole, type: "line", x0: at, x1: at, line };
    });
    layout.annotations = limits.map(([limit, at]) => {
      const place = { x: at, y: 1, yref: "paper", yanchor: "bottom", showarrow: false };
      return { ...place, text: limit, font: { size: 12, color: paint(limit) } };
    });
    if (isOwn) {
      for (const [x0, x1] of [[range[0], limits[0][1]], [limits[2][1], range[1]]]) {
        const shade = { fillcolor: color("bad"), opacity: 0.08, line: { width: 0 }, layer: "below" };
        layout.shapes.push({ ...whole, ...shade, type: "rect", x0, x1 });
      }
    }
    this.cellsRange = range;
    return layout;
  }

  #point(event) {
    if (!this.cells) return;
    const { rows, bins, margin, height } = this.cells;
    const box = this.plot.getBoundingClientRect();
    const [low, high] = this.cellsRange;
    const x = low + ((event.clientX - box.left - margin.l) / (box.width - margin.l - margin.r)) * (high - low);
    const y = ((event.clientY - box.top - margin.t) / (height - margin.t - margin.b)) * rows.length;
    const row = rows[Math.floor(y)];
    const at = Math.floor(x) - bins[0];
    if (!row || at < 0 || at >= bins.length) return say(this.value, "\u00a0");
    const where = at === 0 ? `below ${powerText(bins[0] + 1)}` : `${powerText(bins[at])} to ${powerText(bins[at] + 1)}`;
    const counts = `${numberText(countsOf(row, bins)[at])} of ${numberText(row.num_nonzero)} values`;
    say(this.value, `${row.module || "(the model)"}: ${counts} from ${where}`.replace("from below", "below"));
  }
}

function countsOf(row, bins) {
  const counts = bins.map(() => 0);
  for (const [exponent, count] of Object.entries(row.exponents)) {
    counts[Math.max(0, Math.min(bins.length - 1, Number(exponent) - bins[0]))] += count;
  }
  return counts;
}

function commonest(names) {
  const counts = new Map();
  for (const name of names) counts.set(name, (counts.get(name) ?? 0) + 1);
  return [...counts].reduce((best, one) => (one[1] > best[1] ? one : best))[0];
}
