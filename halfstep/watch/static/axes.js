// Ranges and ticks of the value axes. All values are plain numbers.

import { numberText, scaleText } from "./text.js";

/** A linear axis around `values`, on a chart of `height` px; a plain one when there is none. */
export function linearAxis(values, height) {
  const [low, high] = extent(values) ?? [0, 1];
  const pad = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
  const range = [low - pad, high + pad];
  const size = niceStep((range[1] - range[0]) / Math.max(3, height / 40));
  const ticks = [];
  for (let k = Math.ceil(range[0] / size); k * size <= range[1]; k++) ticks.push(k * size);
  return { type: "linear", range, tickvals: ticks, ticktext: ticks.map((tick) => tickText(tick, size)) };
}

/** A linear axis from zero up. */
export function upwardAxis(values, height) {
  const axis = linearAxis([0, ...values], height);
  axis.range[0] = 0;
  return axis;
}

/** A logarithmic axis: ticks at powers of ten, with 2 and 5 between them where there is room. */
export function decimalAxis(values) {
  const [low, high] = logExtent(values, Math.log10, 0.15);
  const every = Math.max(1, Math.ceil((high - low) / 5));
  const digits = high - low < 1 ? [1, 1.5, 2, 3, 5, 7] : high - low < 2.5 ? [1, 2, 5] : [1];
  const ticks = [];
  for (let power = Math.floor(low); power <= high; power++) {
    if (digits.length === 1 && power % every) continue;
    for (const digit of digits) ticks.push(digit * 10 ** power);
  }
  return { type: "log", range: [low, high], tickvals: ticks, ticktext: ticks.map(shortNumber) };
}

/** A logarithmic axis of loss scales, with ticks at powers of two. */
export function binaryAxis(values) {
  const [low, high] = logExtent(values, Math.log2, 0.8);
  const every = Math.max(1, Math.ceil((high - low) / 5));
  const powers = [];
  for (let power = Math.ceil(low); power <= high; power++) if (power % every === 0) powers.push(power);
  const toDecimal = Math.log10(2);
  return {
    type: "log",
    range: [low * toDecimal, high * toDecimal],
    tickvals: powers.map((power) => 2 ** power),
    ticktext: powers.map((power) => scaleText(2 ** power)),
  };
}

/** Ticks of the axis of steps, at whole ones, where labels have room. */
export function stepTicks([low, high], width) {
  const size = Math.max(1, niceStep((high - low) / Math.max(2, width / 110)));
  const ticks = [];
  for (let k = Math.ceil(low / size); k * size <= high; k++) ticks.push(k * size || 0); // never -0
  return { tickvals: ticks, ticktext: ticks.map((tick) => tick.toLocaleString("en")) };
}

function extent(values) {
  let low = Infinity;
  let high = -Infinity;
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return low <= high ? [low, high] : null;
}

function logExtent(values, log, least) {
  const found = extent(values.filter((value) => value > 0));
  if (!found) return [-1, 1];
  const [low, high] = found.map(log);
  const pad = Math.max((high - low) * 0.08, least);
  return [low - pad, high + pad];
}

function niceStep(rough) {
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].find((digit) => digit * power >= rough * 0.999) * power;
}

function tickText(tick, size) {
  if (Math.abs(tick) < size / 1e6) return "0";
  if (Math.abs(tick) >= 1e4 || size < 1e-4) return shortNumber(tick);
  return tick.toLocaleString("en", { maximumFractionDigits: Math.max(0, -Math.floor(Math.log10(size * 1.0001))) });
}

function shortNumber(value) {
  const size = Math.abs(value);
  const units = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]];
  for (const [unit, letter] of units) {
    const divisor = letter === "k" ? 1e3 : unit;
    if (size >= unit && size < 1e15) return `${Number((value / divisor).toPrecision(3))}${letter}`;
  }
  return numberText(Number(value.toPrecision(3)));
}
