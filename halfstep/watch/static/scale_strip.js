// The loss scale, and below it the steps that were skipped and the micro-batches that ran again.

import { binaryAxis } from "./axes.js";
import { color } from "./plot.js";
import { Strip } from "./strip.js";
import { scaleText, say } from "./text.js";

const LANES = { skips: "bad", replays: "open" };

export class ScaleStrip extends Strip {
  marks = { skips: [], replays: [] };

  constructor(view) {
    super(view, {
      name: "scale",
      title: "Loss scale",
      height: 170,
      axis: binaryAxis,
      format: scaleText,
      shape: "hv",
    });
  }

  get content() {
    return [super.content, this.marks];
  }

  showValues(step) {
    super.showValues(step);
    if (step === null) return;
    const [low, high] = this.view.range;
    const close = Math.max(0.5, (high - low) / 300);
    const words = Object.keys(LANES).flatMap((name) => {
      const near = this.marks[name].filter(([place]) => Math.abs(place - step) <= close);
      const count = near.reduce((sum, [, some]) => sum + some, 0);
      return count ? [`${count} ${count === 1 ? name.slice(0, -1) : name}`] : [];
    });
    if (words.length) say(this.values, [this.values.textContent, ...words].join(", "));
  }

  traces(layout, stepsPerPx) {
    layout.yaxis.domain = [0.32, 1];
    layout.yaxis2 = { ...layout.yaxis2, overlaying: undefined, domain: [0, 1] };
    layout.xaxis.anchor = "y3";
    layout.yaxis3 = {
      domain: [0, 0.22],
      range: [-0.6, 1.6],
      tickvals: [0, 1],
      ticktext: ["replays", "skips"],
      tickfont: layout.yaxis.tickfont,
      showgrid: false,
      zeroline: false,
      fixedrange: true,
    };
    const lanes = Object.entries(LANES).map(([name, paint], i) => ({
      type: "scatter",
      mode: "markers",
      x: this.marks[name].map(([step]) => step),
      y: this.marks[name].map(() => 1 - i),
      yaxis: "y3",
      cliponaxis: false,
      marker: {
        symbol: i ? "circle" : "x",
        size: this.marks[name].map(([, count]) => Math.min(12, 6 + Math.log2(count))),
        color: color(paint),
        line: { width: 0 },
      },
    }));
    return [...super.traces(layout, stepsPerPx), ...lanes];
  }
}
