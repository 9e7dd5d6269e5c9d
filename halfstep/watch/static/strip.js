// One chart of the column: a gutter with its name and its numbers, and curves over the axis that all charts share.

import { stepTicks } from "./axes.js";
import { isSpiky, nonfiniteText, thin, trendLine, valueAt, visible } from "./line.js";
import { axisStyle, baseLayout, color, COARSE, draw, scheme } from "./plot.js";
import { button, element, numberText, say } from "./text.js";

const NARROW = matchMedia("(max-width: 760px)");
const FEW = 60; // points that are drawn as such
const DENSE = 300; // points from which a curve has a trend
export const MANY = 6; // lines from which each has to be fainter
const EDGE = { overlaying: "y", range: [0, 1], visible: false, fixedrange: true };

export function isNarrow() {
  return NARROW.matches;
}

/**
 * A chart. settings: name, title, note, height, axis(values), and format(value) of its numbers; canBeLog offers a
 * button; noun names one value in the line that stands for a chart without a finite one. It shows `lines`, of line.js
 * with a name, color and dash, a `band`, and `lanes`.
 */
export class Strip {
  #drawn = "";
  #isDragged = false;
  #isNear = true;
  #width = 0;
  #log = null;
  #isChosen = false; // by the button: how the axis is
  #nothing = "";
  lines = [];
  band = null;
  lanes = [];

  constructor(view, settings) {
    Object.assign(this, { view, format: numberText, height: 150, ...settings });
    const { name, title, note, height } = this;
    this.heading = element("h2", { id: `chart-${name}` }, title);
    this.values = element("div", { class: "values" });
    this.plot = element("div", { class: "canvas" });
    this.cursor = element("div", { class: "cursor", hidden: "" });
    this.gutter = element("div", { class: "gutter" }, this.heading, this.values);
    if (note) this.gutter.append(element("p", { class: "note" }, note));
    const frame = element("div", { class: "plot" }, this.plot, this.cursor);
    this.frame = frame;
    const attributes = { class: "strip", "data-chart": name, "aria-labelledby": `chart-${name}` };
    this.node = element("section", attributes, this.gutter, frame);
    this.setHeight(height);
    if (this.canBeLog) this.#offerLog();
    frame.addEventListener("pointermove", (event) => this.#point(event));
    frame.addEventListener("pointerdown", (event) => this.#press(event));
    frame.addEventListener("pointerleave", () => COARSE || view.point(null));
    new IntersectionObserver(([entry]) => this.#near(entry.isIntersecting), { rootMargin: "300px" }).observe(this.node);
  }

  /** Space around the plot, with equal sides for every chart, so that equal steps stand below each other. */
  get margins() {
    return isNarrow() ? { l: 54, r: 14, t: 8, b: 24 } : { l: 58, r: 26, t: 10, b: 24 };
  }

  /** What is drawn; a chart is drawn anew when this differs. */
  get content() {
    return [this.lines, this.band, this.lanes];
  }

  get isNear() {
    return this.#isNear && !this.node.hidden;
  }

  setHeight(height) {
    this.height = height;
    this.node.style.setProperty("--height", `${height}px`);
  }

  #near(isNear) {
    this.#isNear = isNear;
    if (isNear) this.draw();
  }

  #offerLog() {
    this.#log = button("log axis", () => this.#toggleLog(), { class: "small", "aria-pressed": "false" });
    this.gutter.append(this.#log);
  }

  #toggleLog() {
    this.#isChosen = true;
    this.#log.ariaPressed = String(this.#log.ariaPressed !== "true");
    this.draw();
  }

  /** Takes the axis, and the size, that suit whole runs, one of `num_steps` steps; a zoom changes neither. */
  suit(num_steps) {
    if (this.#log && !this.#isChosen) this.#log.ariaPressed = String(isSpiky(this.lines));
    this.#nothing = this.noun && !this.isCompared ? nonfiniteText(this.lines[0], num_steps, this.noun) : "";
    this.node.classList.toggle("flat", this.#nothing !== "");
  }

  #step(event) {
    const { l, r } = this.margins;
    const box = this.plot.getBoundingClientRect();
    const share = (event.clientX - box.left - l) / (box.width - l - r);
    const [low, high] = this.view.range;
    return share < 0 || share > 1 ? null : Math.round(low + share * (high - low));
  }

  #point(event) {
    if (!this.#isDragged) this.view.point(this.#step(event));
  }

  #press(event) {
    if (COARSE) return this.view.point(this.#step(event));
    // A chart that is drawn anew under a drag would lose it.
    this.#isDragged = true;
    const end = () => {
      this.#isDragged = false;
      setTimeout(() => this.draw());
    };
    for (const name of ["pointerup", "pointercancel"]) addEventListener(name, end, { once: true });
  }

  /** The line at the cursor, and the numbers there, or the last ones. */
  showCursor() {
    if (!this.isNear) return;
    const step = this.view.cursor;
    const [low, high] = this.view.range;
    const { l, r } = this.margins;
    this.cursor.hidden = step === null || step < low || step > high;
    const x = l + ((step - low) / (high - low)) * (this.#width - l - r);
    this.cursor.style.transform = `translateX(${x}px)`;
    this.showValues(step);
  }

  showValues(step) {
    const [line] = this.lines;
    say(this.values, this.#nothing || (line ? this.format(valueAt(line, step)) : "–"));
  }

  /** Draws what has changed since the last time, unless nobody can see it. */
  draw() {
    this.#width = this.plot.clientWidth;
    this.showCursor();
    if (!this.view.isKnown || !this.isNear || this.#isDragged || !globalThis.Plotly || !this.#width) return;
    const { range } = this.view;
    const isLog = this.#log?.ariaPressed === "true";
    const key = JSON.stringify([range, this.content, scheme(), this.#width, this.height, isLog]);
    if (key === this.#drawn) return;
    const isFirst = this.#drawn === "";
    this.#drawn = key;
    const margin = this.margins;
    const width = this.#width - margin.l - margin.r;
    const layout = baseLayout(this.plot, this.height, margin);
    layout.xaxis = { ...axisStyle(), range: [...range], ...stepTicks(range, width), fixedrange: COARSE };
    layout.yaxis = { ...axisStyle(), fixedrange: true, ...this.#axis(range, isLog) };
    layout.yaxis2 = { ...EDGE };
    const traces = this.traces(layout, (range[1] - range[0]) / width);
    draw(this.plot, traces, layout);
    if (isFirst) this.#listen();
  }

  #axis(range, isLog) {
    const values = this.lines.flatMap((line) => visible(line.steps, line.values, range));
    if (this.band) for (const side of ["low", "high"]) values.push(...visible(this.band.steps, this.band[side], range));
    const axis = isLog ? this.logAxis(values, this.height) : this.axis(values, this.height);
    return values.length || !this.lines.length ? axis : { ...axis, showticklabels: false, showgrid: false };
  }

  #listen() {
    this.plot.on("plotly_relayout", (change) => {
      const [low, high] = ["xaxis.range[0]", "xaxis.range[1]"].map((name) => change[name]);
      if (low !== undefined && high !== undefined) this.view.zoom(Number(low), Number(high));
    });
    this.plot.on("plotly_doubleclick", () => this.view.reset());
  }

  /** stepsPerPx: how many steps share a pixel. */
  traces(layout, stepsPerPx) {
    const isLog = layout.yaxis.type === "log";
    const curves = this.lines.map((line) => this.#curve(line, isLog));
    const trends = curves.filter((curve) => curve.opacity < 1).map((curve) => trendLine(curve, isLog));
    const marks = this.lines.flatMap((line) => this.#marks(line, isLog, stepsPerPx));
    return [...this.#lanes(stepsPerPx), ...curves, ...this.#band(layout.yaxis), ...trends, ...marks];
  }

  #curve({ color: paint, dash, steps, values }, isLog) {
    const numSeen = visible(steps, values, this.view.range).length;
    const few = numSeen <= FEW;
    const dense = this.hasTrend && numSeen > DENSE;
    return {
      type: "scatter",
      mode: few ? "lines+markers" : "lines",
      x: steps,
      y: isLog ? values.map((value) => (value > 0 ? value : null)) : values,
      line: { color: color(paint), width: few ? 1.5 : 1, dash, shape: this.shape ?? "linear" },
      marker: { color: color(paint), size: 4 },
      opacity: !dense ? 1 : this.lines.length > MANY ? 0.12 : 0.4,
    };
  }

  /** At the top edge what is not finite, at the bottom edge what a logarithmic axis has no place for. */
  #marks({ color: paint, steps, values, marks }, isLog, stepsPerPx) {
    const bad = thin(marks.map(([step]) => step), stepsPerPx);
    const zeros = isLog ? thin(steps.filter((_, i) => !(values[i] > 0)), stepsPerPx) : [];
    // Of several runs, each in its own colour.
    const tone = this.isCompared ? paint : "bad";
    return [
      ...(bad.length ? [edgeMarks(bad, 1, "triangle-down", tone)] : []),
      ...(zeros.length ? [edgeMarks(zeros, 0, "triangle-up", this.isCompared ? paint : "open")] : []),
    ];
  }

  /** One shape for each stretch of blocks without a hole. */
  #band({ type, range }) {
    if (!this.band) return [];
    const { steps, low, high } = this.band;
    const least = type === "log" ? 10 ** range[0] : -Infinity; // a logarithmic axis has no place below
    const shape = { x: [], y: [] };
    for (let start = 0, end; start < steps.length; start = end + 1) {
      end = steps.indexOf(null, start);
      if (end < 0) end = steps.length;
      const stretch = steps.slice(start, end);
      const corners = [...low.slice(start, end), ...high.slice(start, end).reverse(), low[start]];
      shape.x.push(...stretch, ...[...stretch].reverse(), stretch[0], null);
      shape.y.push(...corners.map((value) => Math.max(value, least)), null);
    }
    const line = { width: 1.25, color: color("band-edge") };
    return [{ type: "scatter", mode: "lines", ...shape, line, fill: "toself", fillcolor: color("band") }];
  }

  /** Vertical lines over the whole height: {color, dash, steps}. */
  #lanes(stepsPerPx) {
    return this.lanes.map(({ color: paint, dash, steps }) => {
      const kept = thin(steps, stepsPerPx);
      return {
        type: "scatter",
        mode: "lines",
        x: kept.flatMap((step) => [step, step, null]),
        y: kept.flatMap(() => [0, 1, null]),
        yaxis: "y2",
        opacity: 0.55,
        line: { color: color(paint), width: 1, dash },
      };
    });
  }
}

function edgeMarks(steps, y, symbol, paint) {
  const marker = { symbol, size: 8, color: color(paint) };
  return { type: "scatter", mode: "markers", x: steps, y: steps.map(() => y), yaxis: "y2", cliponaxis: false, marker };
}
