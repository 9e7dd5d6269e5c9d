// The gradient of every parameter over the steps, as the exponent of its norm.

import { nearest } from "./line.js";
import { chartText, element, numberText, powerText, say, shortName, toNumber } from "./text.js";
import { color, heatColors, heatLegend } from "./plot.js";
import { isNarrow, Strip } from "./strip.js";

const GUTTER_PX = 176; // as .strip in page.css
const MOST_HEIGHT = 640;
/** What has no exponent, and the colour that it has instead. */
const SPECIAL = [
  ["zero", "open", (norm) => norm === 0],
  ["not finite", "bad", (norm) => norm !== null && !Number.isFinite(norm)],
];

export class LayerStrip extends Strip {
  #layers = null;
  #row = null;
  #legend = element("div");

  constructor(view) {
    const note = "One row a parameter, the colour is the exponent of its gradient's true norm.";
    super(view, { name: "layers", title: "Gradient norm by parameter", note, height: 200 });
    this.node.classList.add("wide");
    this.gutter.append(this.#legend);
    this.frame.addEventListener("pointermove", (event) => this.#pointRow(event));
  }

  get margins() {
    const margins = super.margins;
    return isNarrow() ? { ...margins, l: 12 } : { ...margins, l: margins.l + GUTTER_PX };
  }

  get content() {
    return this.#layers;
  }

  show(layers) {
    this.#layers = layers;
    const count = layers.parameters.length;
    this.setHeight(Math.min(MOST_HEIGHT, 40 + count * (count > 40 ? 10 : 16)));
  }

  axis() {
    const { parameters } = this.#layers;
    const every = Math.ceil((parameters.length * 13) / this.height);
    return {
      range: [parameters.length - 0.5, -0.5],
      tickvals: parameters.map((_, i) => i).filter((i) => i % every === 0),
      ticktext: parameters.filter((_, i) => i % every === 0).map((name) => chartText(shortName(name, 32))),
      showticklabels: !isNarrow(),
      tickfont: { size: 11, color: color("soft") },
      showgrid: false,
    };
  }

  #pointRow(event) {
    if (!this.#layers) return;
    const { t, b } = this.margins;
    const box = this.plot.getBoundingClientRect();
    const share = (event.clientY - box.top - t) / (this.height - t - b);
    this.#row = share < 0 || share >= 1 ? null : Math.floor(share * this.#layers.parameters.length);
    this.showValues(this.view.cursor);
  }

  showValues(step) {
    if (!this.#layers) return;
    const { steps, parameters, norms } = this.#layers;
    if (step === null || this.#row === null || !steps.length) {
      say(this.values, `${parameters.length} parameters`);
      return;
    }
    const at = nearest(steps, step);
    const name = parameters[this.#row];
    say(this.values, `${name} at step ${numberText(steps[at])}: ${numberText(norms[at][this.#row])}`);
  }

  traces() {
    const { steps, parameters, norms } = this.#layers;
    const rows = parameters.map((_, row) => norms.map((at) => toNumber(at[row])));
    const finite = rows.map((row) => row.map((norm) => (norm > 0 && norm < Infinity ? Math.log2(norm) : null)));
    const all = finite.flat().filter((power) => power !== null);
    const low = Math.floor(all.reduce((a, b) => Math.min(a, b), Infinity));
    const high = Math.ceil(all.reduce((a, b) => Math.max(a, b), -Infinity));
    const heat = { type: "heatmap", x: steps, y: parameters.map((_, i) => i), showscale: false, hoverinfo: "skip" };
    const traces = all.length ? [{ ...heat, z: finite, zmin: low, zmax: high, colorscale: heatColors() }] : [];
    const signs = [];
    for (const [word, paint, is] of SPECIAL) {
      const z = rows.map((row) => row.map((norm) => (is(norm) ? 1 : null)));
      if (!z.flat().some(Boolean)) continue;
      traces.push({ ...heat, z, zmin: 0, zmax: 1, colorscale: [[0, color(paint)], [1, color(paint)]] });
      signs.push(element("span", { class: `swatch ${paint}` }), word);
    }
    const ends = all.length ? [powerText(low), powerText(high)] : ["", ""];
    this.#legend.replaceChildren(heatLegend(...ends, ...signs));
    return traces;
  }
}
