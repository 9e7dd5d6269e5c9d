// Asks the server again and again for what may have changed, and says so when it does not answer.

import { say } from "./text.js";

const VISIBLE_MS = 1000;
const HIDDEN_MS = 15000;
const UNFINISHED_MS = 250;
const SELDOM_MS = 10000;
const LONGEST_MS = 30000;

/**
 * Asks for the addresses that `addresses()` gives, a map of a name to an address, from now on.
 * changed(name, data): there is something new. gone(name, line): it is not there; that asks seldom from then on
 * if it gives true.
 * Returns a function that asks at once, as after a zoom.
 */
export function ask(addresses, changed, gone) {
  const held = new Map(); // of a name: the address and the ETag of the last answer
  let timer, isAsking, isDue, failures = 0;

  /** Gives how soon it has to be asked again, in ms. */
  async function one(name, address) {
    const last = held.get(name);
    const headers = last?.address === address && last.tag ? { "If-None-Match": last.tag } : {};
    const answer = await fetch(address, { headers, cache: "no-store", signal: AbortSignal.timeout(LONGEST_MS) });
    if (answer.status === 304) return VISIBLE_MS;
    const { error } = answer.ok ? {} : await answer.json().catch(() => ({}));
    if (answer.status === 404) {
      held.delete(name);
      return gone(name, error ?? "It is not there.") === true ? SELDOM_MS : VISIBLE_MS;
    }
    if (answer.status === 401) {
      throw new Refusal("This page needs its token: open the whole address that halfstep watch printed.");
    }
    if (!answer.ok) throw new Refusal(error ?? `halfstep watch answered with error ${answer.status}, trying again`);
    const data = await answer.json();
    if (addresses()[name] !== address) return UNFINISHED_MS; // the view moved on meanwhile, and so will the next answer
    held.set(name, { address, tag: answer.headers.get("ETag") });
    changed(name, data);
    return data.is_complete === false ? UNFINISHED_MS : VISIBLE_MS;
  }

  async function round() {
    clearTimeout(timer);
    if (isAsking) {
      isDue = true;
      return;
    }
    isAsking = true;
    isDue = false;
    let soonest = VISIBLE_MS;
    try {
      const asked = Object.entries(addresses()).map(([name, address]) => one(name, address));
      const pauses = await Promise.all(asked);
      if (pauses.length) soonest = Math.min(...pauses);
      failures = 0;
      tell("");
    } catch (error) {
      failures += 1;
      const isSilence = error.name === "TypeError" || error.name === "TimeoutError" || error.name === "AbortError";
      if (!isSilence && !(error instanceof Refusal)) console.error(error);
      tell(error instanceof Refusal ? error.message : isSilence ? "no answer from halfstep watch, trying again" : "");
    }
    isAsking = false;
    const pause = document.hidden ? HIDDEN_MS : soonest * Math.min(5, 1 + failures);
    timer = setTimeout(round, isDue ? 0 : pause);
  }

  document.addEventListener("visibilitychange", () => document.hidden || round());
  round();
  return round;
}

/** One line that floats over the page; an empty one takes it away. */
function tell(line) {
  say(document.getElementById("news"), line);
}

class Refusal extends Error {}
