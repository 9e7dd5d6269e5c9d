// The column of charts over one axis: its bar of buttons, its keys, and who draws when.

import { onScheme } from "./plot.js";
import { button, element, numberText, say } from "./text.js";

const NEWEST = [10000, 1000, 100];
const HELP = "Drag across a chart to zoom, double-click for all, shift and drag to move. Keys: arrows, +, -, 0.";
const SIGNS =
  "Triangles at the top edge are values that are not finite, at the bottom edge those that a logarithmic axis" +
  " has no place for. Where a curve is dense, the bold line is its running average without outliers.";

export class Column {
  #isDue = false;
  #isPointed = false;
  #widest = 0;

  /** asked() is called when another part of the axis is shown. */
  constructor(view, charts, asked) {
    Object.assign(this, { view, charts });
    this.place = element("p", { class: "place" });
    this.newest = [null, ...NEWEST].map((count) => this.#newest(count));
    const moves = [
      ["‹", "Earlier steps", () => view.pan(-0.5)],
      ["−", "More steps", () => view.widen(2)],
      ["+", "Fewer steps", () => view.widen(0.5)],
      ["›", "Later steps", () => view.pan(0.5)],
    ].map(([sign, label, press]) => button(sign, press, { "aria-label": label, title: label }));
    const group = (label, parts) => element("div", { class: "buttons", role: "group", "aria-label": label }, ...parts);
    const groups = [group("Steps shown", this.newest), group("Zoom", moves)];
    const bar = element("div", { class: "bar" }, ...groups, this.place);
    const strips = charts.map((chart) => chart.node);
    const attributes = { class: "strips", tabindex: "0", role: "group", "aria-label": `Charts over steps. ${HELP}` };
    this.strips = element("div", attributes, ...strips);
    const help = element("p", { class: "note help" }, `${HELP} ${SIGNS}`);
    this.node = element("div", { class: "column" }, bar, this.strips, help);
    this.strips.addEventListener("keydown", (event) => this.#key(event));
    view.listen((what) => (what === "cursor" ? this.#showCursor() : (this.draw(), asked())));
    onScheme(() => this.draw());
    new ResizeObserver(() => this.#resized(asked)).observe(this.strips);
  }

  #newest(count) {
    const text = count === null ? "all" : `last ${numberText(count)}`;
    return button(text, () => this.view.newest(count), { "aria-pressed": "false", "data-newest": String(count) });
  }

  /** Points to ask for, which grow with the width of the charts. */
  get points() {
    return Math.min(3000, Math.max(300, Math.round(this.strips.clientWidth / 100) * 200));
  }

  #resized(asked) {
    if (!this.strips.clientWidth) return;
    this.draw();
    if (this.points !== this.#widest) {
      this.#widest = this.points;
      asked();
    }
  }

  #key(event) {
    if (event.target !== this.strips || event.ctrlKey || event.metaKey || event.altKey) return;
    const { view } = this;
    const keys = {
      ArrowLeft: () => view.pan(-0.25),
      ArrowRight: () => view.pan(0.25),
      "+": () => view.widen(0.5),
      "=": () => view.widen(0.5),
      "-": () => view.widen(2),
      0: () => view.reset(),
      Escape: () => view.reset(),
    };
    if (!(event.key in keys)) return;
    event.preventDefault();
    keys[event.key]();
  }

  #showCursor() {
    if (this.#isPointed) return;
    this.#isPointed = true;
    requestAnimationFrame(() => {
      this.#isPointed = false;
      for (const chart of this.charts) chart.showCursor();
      this.#showPlace();
    });
  }

  #showPlace() {
    const { view } = this;
    const [first, last] = view.seen.map(numberText);
    if (!view.isKnown) return;
    const where = last === "0" ? "no step yet" : first === last ? `step ${last}` : `steps ${first} to ${last}`;
    say(this.place, view.cursor === null ? where : `step ${numberText(view.cursor)}`);
    const pressed = view.isZoomed ? "" : String(view.follow);
    for (const one of this.newest) one.ariaPressed = String(one.dataset.newest === pressed);
  }

  /** Draws before the next frame, however often it is called. */
  draw() {
    if (this.#isDue) return;
    this.#isDue = true;
    requestAnimationFrame(() => {
      this.#isDue = false;
      this.#showPlace();
      for (const chart of this.charts) chart.draw();
    });
  }
}
