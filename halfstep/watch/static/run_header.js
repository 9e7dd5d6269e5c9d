// The head of a run's page: what it is, how it does, and which rank is shown.

import { numbersOf, worstLook } from "./severity.js";
import { setState, stateMark, stepsPerSecond } from "./state.js";
import { countText, element, numberText, say, scaleText, setAge } from "./text.js";

const FACTS = {
  loss: ["loss", (run) => numberText(run.loss)],
  grad_norm: ["gradient norm", (run) => numberText(run.grad_norm)],
  scale: ["scale", (run) => scaleText(run.scale)],
  policy: ["policy", (run) => run.effective || run.policy || "–"],
  steps: ["steps", (run) => numberText(run.num_steps)],
  speed: ["steps/s", (run) => numberText(stepsPerSecond(run))],
  skips: ["skips", (run) => numberText(run.num_skipped)],
  replays: ["replays", (run) => numberText(run.num_replays)],
  alerts: ["alerts", (run) => numberText(run.num_alerts)],
};

export class RunHeader {
  #ranks = "";

  /** choose(rank) is called when another rank is chosen. */
  constructor(name, choose) {
    this.state = stateMark();
    this.errors = element("a", { href: "#alerts", class: "bad", hidden: "" });
    this.why = element("p", { class: "note" });
    this.reason = element("p", { class: "note reason" });
    this.facts = Object.fromEntries(Object.keys(FACTS).map((key) => [key, element("dd", {}, "–")]));
    this.age = element("time");
    this.select = element("select", { "aria-label": "Rank" });
    this.select.addEventListener("change", () => choose(Number(this.select.value)));
    this.rank = element("div", { hidden: "" }, element("dt", {}, "rank"), element("dd", {}, this.select));
    const pairs = Object.entries(FACTS).map(([key, [term]]) => {
      return element("div", { "data-fact": key }, element("dt", {}, term), this.facts[key]);
    });
    const updated = element("div", {}, element("dt", {}, "updated"), element("dd", {}, this.age));
    this.list = element("dl", { class: "facts" }, ...pairs, updated, this.rank);
    const home = element("a", { href: "/" }, "all runs");
    this.node = element(
      "header",
      {},
      element("p", { class: "eyebrow" }, "halfstep watch ", home),
      element("div", { class: "title" }, element("h1", {}, name), this.state, this.errors),
      this.why,
      this.list,
      this.reason,
    );
  }

  /** Alerts say in their place why a run failed; it is not said twice. */
  show(run, alerts) {
    setState(this.state, run.state, run.why);
    say(this.why, alerts.some(({ message }) => run.why?.includes(message)) ? "" : (run.why ?? ""));
    this.why.classList.remove("bad");
    for (const [key, [, text]] of Object.entries(FACTS)) say(this.facts[key], text(run));
    // What is not finite is a text in JSON.
    for (const key of ["loss", "grad_norm"]) this.facts[key].classList.toggle("bad", typeof run[key] === "string");
    const { error } = numbersOf(alerts);
    this.errors.hidden = !error;
    say(this.errors, `◆ ${countText(error, "error")}`);
    this.facts.alerts.className = alerts.length ? worstLook(alerts).color : "";
    this.list.hidden = false;
    const versions = Object.entries(run.versions ?? {}).map(([name, version]) => `${name} ${version}`);
    const reason = run.reason ? `${run.effective || run.policy}: ${run.reason}.` : "";
    const place = [run.device, versions.join(", ")].map((part) => part && `${part}.`);
    say(this.reason, [reason, ...place].filter(Boolean).join(" "));
    setAge(this.age, run.updated);
    this.#showRanks(run);
  }

  #showRanks(run) {
    const ranks = run.ranks ?? [];
    this.rank.hidden = ranks.length < 2;
    const key = ranks.join();
    if (key === this.#ranks) return;
    this.#ranks = key;
    const chosen = this.select.value || String(run.rank);
    const options = ranks.map((rank) => element("option", { value: rank }, `${rank} of ${run.num_ranks}`));
    this.select.replaceChildren(...options);
    this.select.value = chosen;
  }

  /** There never was such a run. */
  showMissing(line) {
    setState(this.state, "no such run", line);
    say(this.why, line);
    this.list.hidden = true;
  }

  /** The run is not there any more; what was drawn stays. */
  showGone(line) {
    setState(this.state, "deleted", line);
    say(this.why, `${line.replace(/\.?$/, ".")} What is drawn here is the last that was seen.`);
    this.why.classList.add("bad");
  }
}
