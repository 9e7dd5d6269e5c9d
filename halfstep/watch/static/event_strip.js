// The chart on top: alerts and what else happened, as marks on the common axis.

import { nearest, thin } from "./line.js";
import { color } from "./plot.js";
import { SEVERITIES } from "./severity.js";
import { Strip } from "./strip.js";
import { countText, say } from "./text.js";

/** Of each severity, and of each other kind of event: its mark for charts, its sign for text, and its colour. */
export const LOOKS = {
  ...SEVERITIES,
  seam: { symbol: "line-ns-open", sign: "┊", color: "seam", dash: "dot" },
  promotion: { symbol: "star", sign: "★", color: "good" },
  reduction: { symbol: "arrow-down", sign: "↓", color: "good" },
  gap: { symbol: "circle-open", sign: "○", color: "soft" },
  end: { symbol: "square", sign: "■", color: "soft" },
  explanation: { symbol: "cross", sign: "✚", color: "soft" },
};
const DRAWN_OVER_ALL = ["seam", "note", "warning", "error"];

export class EventStrip extends Strip {
  #items = [];

  constructor(view) {
    super(view, { name: "events", title: "Alerts and events", height: 84 });
  }

  get content() {
    return this.#items;
  }

  axis() {
    const axis = { type: "linear", range: [-0.6, 1.6], tickvals: [0, 1], ticktext: ["events", "alerts"] };
    return { ...axis, showgrid: false };
  }

  /** items: [{look, step, label}], ascending; gives the vertical lines for the other charts. */
  show(items) {
    this.#items = items;
    this.num_alerts = items.filter((item) => item.isAlert).length;
    const steps = (look) => items.filter((item) => item.look === look).map((item) => item.step);
    this.lanes = DRAWN_OVER_ALL.map((look) => ({ ...LOOKS[look], steps: steps(look) })).filter((l) => l.steps.length);
    return this.lanes;
  }

  showValues(step) {
    const at = step === null ? -1 : nearest(this.#items, step, (item) => item.step);
    const [low, high] = this.view.range;
    const isClose = at >= 0 && Math.abs(this.#items[at].step - step) <= (high - low) / 100;
    say(this.values, isClose ? this.#items[at].label : countText(this.num_alerts ?? 0, "alert"));
  }

  traces(layout, stepsPerPx) {
    const marks = Object.entries(LOOKS).flatMap(([look, { symbol, color: paint }]) => {
      const items = this.#items.filter((item) => item.look === look);
      const x = thin(items.map((item) => item.step), stepsPerPx);
      if (!x.length) return [];
      const y = x.map(() => (items[0].isAlert ? 1 : 0));
      const marker = { symbol, size: 10, color: color(paint), line: { width: 2, color: color(paint) } };
      if (!symbol.endsWith("open")) marker.line.width = 0;
      return [{ type: "scatter", mode: "markers", x, y, marker, cliponaxis: false }];
    });
    return [...super.traces(layout, stepsPerPx), ...marks];
  }
}
