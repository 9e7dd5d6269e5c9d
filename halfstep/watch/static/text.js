// Numbers, times and names as text, and elements that hold them. Nothing from outside ever becomes markup.

const SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹";
const DASH = "–";

/** An element; strings among the children become text. */
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) if (value !== null) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/** A button that calls `press`. */
export function button(text, press, attributes = {}) {
  const made = element("button", { type: "button", ...attributes }, text);
  made.addEventListener("click", press);
  return made;
}

/** Sets the text of a node, and touches nothing when it is there already. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** A number of the JSON: NaN and inf are texts there; null is unknown. */
export function toNumber(value) {
  return value === null || value === undefined ? null : Number(value);
}

/** Four significant digits; whole numbers in full; NaN and inf as words; a dash for what is unknown. */
export function numberText(value) {
  const number = toNumber(value);
  if (number === null) return DASH;
  if (Number.isNaN(number)) return "NaN";
  if (!Number.isFinite(number)) return number > 0 ? "inf" : "-inf";
  const size = Math.abs(number);
  if (Number.isInteger(number) && size < 1e7) return number.toLocaleString("en");
  if (size < 1e-3 || size >= 1e7) return number.toExponential(3).replace(/\.?0*e\+?/, "e");
  return number.toLocaleString("en", { maximumSignificantDigits: 4 });
}

/** 2 to a whole power, written small. */
export function powerText(power) {
  const digits = [...String(Math.abs(power))].map((digit) => SUPERSCRIPTS[digit]).join("");
  return `2${power < 0 ? "⁻" : ""}${digits}`;
}

/** A loss scale: as a power of two where it is one, but 1, 2, 4 and 8 plainly. */
export function scaleText(value) {
  const power = Math.log2(toNumber(value) ?? NaN);
  return Number.isInteger(power) && (power < 0 || power > 3) ? powerText(power) : numberText(value);
}

/** As "2 errors, 1 warning": of a map of nouns to counts, those that are. */
export function countsText(counts) {
  return Object.entries(counts).filter(([, count]) => count).map(([noun, count]) => countText(count, noun)).join(", ");
}

export function countText(count, noun) {
  return `${numberText(count)} ${noun}${count === 1 ? "" : "s"}`;
}

/** The end of a long name tells more than its beginning. */
export function shortName(name, most) {
  return name.length <= most ? name : `…${name.slice(1 - most)}`;
}

/** Text for a label of a chart, where Plotly reads a little HTML. */
export function chartText(text) {
  const names = { "&": "&amp;", "<": "&lt;", ">": "&gt;" };
  return text.replace(/[&<>]/g, (sign) => names[sign]).replaceAll("%{", "% {");
}

/** The address of a run's page. */
export function runAddress(name) {
  const path = name.split("/").map(encodeURIComponent).join("/");
  return name.endsWith(".json") ? `/run/${path}/` : `/run/${path}`; // what ends with .json is data
}

/** How long ago a time in seconds since 1970 was. */
export function ageText(time) {
  const seconds = Math.max(0, Date.now() / 1000 - time);
  const units = [[86400, "d"], [3600, "h"], [60, "min"]];
  for (const [size, unit] of units) if (seconds >= size) return `${Math.floor(seconds / size)} ${unit} ago`;
  return seconds < 3 ? "now" : `${Math.floor(seconds)} s ago`;
}

/** Shows in `node` how long ago `time` was, from now on. */
export function setAge(node, time) {
  if (time === null) {
    delete node.dataset.time;
    say(node, DASH);
    return;
  }
  node.dataset.time = time;
  node.title = new Date(time * 1000).toLocaleString();
  say(node, ageText(time));
}

/** Keeps every age on the page true. */
export function tickAges() {
  setInterval(() => {
    if (document.hidden) return;
    for (const node of document.querySelectorAll("[data-time]")) say(node, ageText(Number(node.dataset.time)));
  }, 5000);
}
