// The state of a run as a mark and a word; never by its colour alone.

import { element, say } from "./text.js";

const SIGNS = {
  running: "▶",
  finished: "✓",
  failed: "✕",
  stalled: "‖",
  lost: "?",
  empty: "○",
  reading: "…",
  deleted: "✕",
  "no such run": "✕",
};

export function stateMark() {
  return element("span", { class: "state" }, element("i", { "aria-hidden": "true" }), element("b"));
}

export function setState(mark, state, why) {
  mark.dataset.state = state;
  mark.title = why || state;
  say(mark.firstChild, SIGNS[state] ?? "·");
  say(mark.lastChild, state);
}

/** Steps a second from the median seconds of a step; null where unknown. */
export function stepsPerSecond(run) {
  return run.seconds ? 1 / Number(run.seconds) : null;
}
