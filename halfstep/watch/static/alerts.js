// The worst alert above the charts, and the list of all and of what else happened below; a click shows the place.

import { LOOKS } from "./event_strip.js";
import { numbersOf, severityOf, worstOf } from "./severity.js";
import { button, countText, countsText, element, numberText, say, scaleText, setAge } from "./text.js";

const MOST_LISTED = 200;
const BEFORE = 150;
const AFTER = 75;

export class Alerts {
  #listed = "";

  /** charts: the element that a click brings into sight. */
  constructor(view, charts) {
    Object.assign(this, { view, charts });
    this.title = element("h2", { id: "alerts" }, "Alerts and events");
    this.list = element("ol", { class: "alerts" });
    this.note = element("p", { class: "note" });
    this.top = element("section", { class: "alerts top", "aria-label": "Worst alert", hidden: "" });
    this.node = element("section", { class: "list", "aria-labelledby": "alerts" }, this.title, this.list, this.note);
  }

  /** Lists them, newest on top; gives all that have a step as marks for the charts, in their order. */
  show(alerts, events, hasRanks) {
    const happened = events.map((event) => eventItem(event, alerts));
    const items = [...alerts.map((alert) => alertItem(alert, hasRanks)), ...happened];
    const placed = items.filter((item) => item.step !== null).sort((a, b) => a.step - b.step);
    const key = JSON.stringify(items);
    if (key !== this.#listed) {
      this.#listed = key;
      this.#showWorst(alerts, hasRanks);
      this.#list(items.sort((a, b) => (b.time ?? 0) - (a.time ?? 0) || isEnd(b) - isEnd(a)), alerts.length);
    }
    return placed;
  }

  #showWorst(alerts, hasRanks) {
    this.top.hidden = alerts.length === 0;
    if (this.top.hidden) return;
    const worst = worstOf(alerts);
    const counts = numbersOf(alerts.filter((alert) => alert !== worst));
    const severity = severityOf(worst);
    const more = { [`more ${severity}`]: counts[severity], ...counts, [severity]: 0 };
    const text = countsText(more);
    const rest = element("p", { class: "note more", hidden: text ? null : "" }, "and ");
    rest.append(element("a", { href: "#alerts" }, text));
    this.top.replaceChildren(this.#entry(alertItem(worst, hasRanks)), rest);
  }

  #list(items, num_alerts) {
    const shown = items.slice(0, MOST_LISTED);
    this.list.replaceChildren(...shown.map((item) => element("li", {}, this.#entry(item))));
    const counts = countsText({ alert: num_alerts, event: items.length - num_alerts });
    say(this.title, num_alerts ? counts : ["No alerts", counts].filter(Boolean).join(", "));
    const rest = items.length - shown.length;
    say(this.note, rest ? `The newest ${MOST_LISTED}; ${countText(rest, "older one")} not listed.` : "");
  }

  #entry(item) {
    const { sign, color: paint } = LOOKS[item.look];
    const icon = element("i", { "aria-hidden": "true" }, sign);
    const mark = element("span", { class: `mark ${paint}` }, icon, ` ${item.look}`);
    const where = item.step === null ? [] : [element("span", {}, `step ${numberText(item.step)}`)];
    if (item.rank !== null) where.push(element("span", {}, `rank ${item.rank}`));
    const age = element("time");
    setAge(age, item.time);
    const what = element("span", { class: "what" }, ...item.lines.map(([tag, text]) => element(tag, {}, text)));
    const parts = [element("span", { class: "where" }, mark, ...where, age), what];
    if (item.step === null) return element("div", { class: "entry" }, ...parts);
    const made = button("", () => this.#go(item.step), { class: "entry" });
    made.append(...parts);
    return made;
  }

  #go(step) {
    this.view.zoom(step - BEFORE, step + AFTER);
    this.view.point(step);
    const isCalm = matchMedia("(prefers-reduced-motion: reduce)").matches;
    this.charts.scrollIntoView({ behavior: isCalm ? "auto" : "smooth", block: "start" });
  }
}

function alertItem({ rule, step, rank, severity, message, action, time }, hasRanks) {
  const lines = [["b", rule], ["span", message], ["em", action]];
  const look = severityOf({ severity });
  const label = `${rule} at step ${numberText(step)}`;
  return { isAlert: true, look, step, rank: hasRanks ? rank : null, time, lines, label };
}

function eventItem(event, alerts) {
  const step = stepOf(event, alerts);
  const look = event.kind in LOOKS ? event.kind : "note";
  const at = step === null ? "" : ` at step ${numberText(step)}`;
  const lines = [["span", eventText(event)]];
  return { isAlert: false, look, step, rank: null, time: event.time, lines, label: `${event.kind}${at}` };
}

/** A run that fails ends in a step that never ended: where an alert tells of that step, so does the end. */
function stepOf({ kind, step = null, time }, alerts) {
  const isNext = (alert) => alert.step === step + 1 && alert.time <= time;
  return kind === "end" && step !== null && alerts.some(isNext) ? step + 1 : step;
}

function isEnd(item) {
  return item.look === "end" ? 1 : 0;
}

function eventText(event) {
  const { kind, state, reason, module, policy, num_lost, scale } = event;
  if (kind === "seam") return "The run goes on from a checkpoint here. Later steps of before do not count.";
  if (kind === "promotion") return `${module} computes in fp32 from here: ${reason}. Policy: ${policy}`;
  if (kind === "reduction") return `The guard lowered the loss scale to ${scaleText(scale)}.`;
  if (kind === "gap") return `The log was lost for a while; entries that were never written: ${numberText(num_lost)}.`;
  if (kind === "end") return reason ? `${state}: ${reason}` : `The process ended: ${state}.`;
  return kind === "explanation" ? explanationText(event) : kind;
}

/** The first sentence of what Stepper(explain=True) or `halfstep trace` say. */
function explanationText({ reason, producer }) {
  if (!producer) return `${reason ?? "The gradient is not finite"}; no operation of the pass made it so.`;
  const { module, holds, kind, phase, op, file, line } = producer;
  const word = kind === "nan" ? "NaN" : kind;
  if (holds) return `${holds} holds ${word}.`;
  return `${module || "The model"} makes ${word} in the ${phase} pass, in ${op}${file ? ` at ${file}:${line}` : ""}.`;
}
