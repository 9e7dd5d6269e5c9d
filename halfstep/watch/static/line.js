// What is known of a line of a chart: {steps, values, marks: [[step, value that is not finite]], end}.

import { toNumber } from "./text.js";

const TREND = 32; // points that make one of its points
const MARK_PX = 4; // marks that are closer share one
const SPIKY = 50; // times the median, from which a linear axis shows little else
const BLOCK = 100; // steps of one value of the golden band, as SIZE of halfstep/watch/window.py

/** A series of the JSON as a line to draw. end: its number where none is pointed at, if not the last one. */
export function lineOf(series, change = (value) => value, end = undefined) {
  const steps = series?.steps ?? [];
  const values = (series?.values ?? []).map((value) => change(toNumber(value)));
  const marks = (series?.nonfinite ?? []).map(([step, value]) => [step, toNumber(value)]);
  return { steps, values, marks, end };
}

/** The golden band of the JSON as corners: of each block its first step and its last, null between distant ones. */
export function bandOf(golden) {
  if (!golden) return null;
  const widths = golden.steps.slice(1).map((step, i) => step - golden.steps[i]);
  const width = widths.sort((a, b) => a - b)[(widths.length - 1) >> 1] ?? BLOCK; // one block may stand for several
  const band = { steps: [], low: [], high: [] };
  let before = 0;
  golden.steps.forEach((last, i) => {
    const first = Math.max(before, last - width);
    const isApart = first > before && i > 0;
    const [low, high] = [toNumber(golden.low[i]), toNumber(golden.high[i])];
    band.steps.push(...(isApart ? [null] : []), first, last);
    band.low.push(...(isApart ? [null] : []), low, low);
    band.high.push(...(isApart ? [null] : []), high, high);
    before = last;
  });
  return band;
}

/** Whether extremes would make the rest of the lines flat on a linear axis, and a logarithmic one has place for all. */
export function isSpiky(lines) {
  const values = lines.flatMap((line) => line.values).filter((value) => value !== null);
  values.sort((a, b) => a - b);
  return values.length > 0 && values[0] > 0 && values.at(-1) / values[values.length >> 1] > SPIKY;
}

/** What a line of `num_steps` steps says instead of a curve when it has no finite value; empty when it has one. */
export function nonfiniteText({ steps, marks }, num_steps, noun) {
  if (steps.length || !marks.length) return "";
  const isNaN = marks.length === num_steps && marks.every(([, value]) => Number.isNaN(value));
  return isNaN ? `every ${noun} is NaN` : `no ${noun} is finite`;
}

/** Whether a window counts as one: then its count a second tells nothing of its own. */
export function isSame(count, steps) {
  const at = count.values.length - 1;
  if (at < 0) return true;
  return count.values.length === steps.values.length && Math.abs(count.values[at] / steps.values[at] - 1) < 1e-6;
}

/** The running mean of the middle half of a curve: the extremes that the curve is made of pull it nowhere. */
export function trendLine(curve, isLog) {
  const known = curve.y.flatMap((value, i) => (value === null ? [] : [[curve.x[i], isLog ? Math.log(value) : value]]));
  const [x, y] = [[], []];
  for (let at = 0; at < known.length; at += TREND / 8) {
    const half = Math.max(TREND / 4, Math.min(at, known.length - 1 - at, TREND / 2)); // less at the ends
    const window = known.slice(Math.max(0, at - half), at + half).map(([, value]) => value);
    const cut = window.length >> 2;
    const middle = window.sort((a, b) => a - b).slice(cut, window.length - cut);
    const mean = middle.reduce((sum, value) => sum + value, 0) / middle.length;
    x.push(known[at][0]);
    y.push(isLog ? Math.exp(mean) : mean);
  }
  return { type: "scatter", mode: "lines", x, y, line: { color: curve.line.color, width: 2, dash: curve.line.dash } };
}

/** Of ascending steps, one where several share a place. */
export function thin(steps, stepsPerPx) {
  let last = -Infinity;
  return steps.filter((step) => step - last >= MARK_PX * stepsPerPx && ((last = step), true));
}

export function visible(steps, values, [low, high]) {
  return values.filter((value, i) => steps[i] >= low && steps[i] <= high && value !== null);
}

/** The value of a line at the step nearest to `step`, of a mark, too; for null its end, or the last one. */
export function valueAt({ steps, values, marks, end }, step) {
  if (step === null && end !== undefined) return end;
  const at = step ?? Infinity;
  const i = nearest(steps, at);
  const j = nearest(marks, at, ([place]) => place);
  if (j < 0) return i < 0 ? null : values[i];
  if (i < 0) return marks[j][1];
  const isMark = step === null ? marks[j][0] > steps[i] : Math.abs(marks[j][0] - at) <= Math.abs(steps[i] - at);
  return isMark ? marks[j][1] : values[i];
}

/** The place of the nearest of ascending items; -1 if there is none. */
export function nearest(items, step, place = (item) => item) {
  let [low, high] = [0, items.length - 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (place(items[middle]) < step) low = middle + 1;
    else high = middle;
  }
  const isNearer = low > 0 && step - place(items[low - 1]) < Math.abs(place(items[low]) - step);
  return isNearer ? low - 1 : low < items.length ? low : -1;
}
