// What every chart takes from the page: Plotly itself, the colours of the scheme, the common layout.

import { element } from "./text.js";

export const COARSE = matchMedia("(pointer: coarse)").matches;
const DARK = matchMedia("(prefers-color-scheme: dark)");
const colors = new Map();
const CONFIG = { displayModeBar: false, doubleClick: false, scrollZoom: false, showTips: false };

DARK.addEventListener("change", () => colors.clear());

/** Loads Plotly once. */
export function loadPlotly() {
  return new Promise((resolve, reject) => {
    const script = element("script", { src: "/static/plotly.js" });
    script.addEventListener("load", resolve);
    script.addEventListener("error", () => reject(new Error("plotly.js did not load")));
    document.head.append(script);
  });
}

/** A colour of the page's style, light or dark. */
export function color(name) {
  if (!colors.has(name)) {
    colors.set(name, getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim());
  }
  return colors.get(name);
}

/** The scheme as a text, which changes when the colours do. */
export function scheme() {
  return DARK.matches ? "dark" : "light";
}

export function onScheme(listener) {
  DARK.addEventListener("change", listener);
}

/** A horizontal axis in the page's colours. */
export function axisStyle() {
  const line = { gridcolor: color("rule"), zeroline: false, linecolor: color("rule"), tickcolor: color("rule") };
  return { ...line, tickfont: { size: 12, color: color("soft") }, automargin: false };
}

/** The layout that all charts share. */
export function baseLayout(node, height, margin) {
  const clear = "rgba(0,0,0,0)";
  return {
    width: node.clientWidth,
    height,
    margin,
    paper_bgcolor: clear,
    plot_bgcolor: clear,
    showlegend: false,
    hovermode: false,
    dragmode: COARSE ? false : "zoom",
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: color("soft") },
  };
}

export function draw(node, traces, layout) {
  return globalThis.Plotly.react(node, traces, layout, CONFIG);
}

/** The colour scale of both heat maps. */
export function heatColors() {
  return [[0, color("heat-low")], [0.6, color("heat-middle")], [1, color("heat-high")]];
}

/** The scale of a heat map as a bar with a label at either end. */
export function heatLegend(low, high, ...more) {
  return element("p", { class: "heat-legend" }, low, element("i", { class: "bar" }), high, ...more);
}
