// The one axis of steps that all charts of a page share: what part is shown, and where the cursor is.

const NARROWEST = 2;

export class View {
  #whole = [0, 0];
  isKnown = false; // what there is
  #span = null; // fixed by a zoom
  #follow = null; // or the newest steps, so many
  #listeners = [];
  cursor = null; // a step

  /** Calls `listener(what)` when "range" or "cursor" changed. */
  listen(listener) {
    this.#listeners.push(listener);
  }

  #tell(what) {
    for (const listener of this.#listeners) listener(what);
  }

  /** The first and the last step that there are. Moves nothing while zoomed in. */
  set whole([first, last]) {
    this.#whole = [first ?? 0, last ?? 0];
    this.isKnown = true;
  }

  get isZoomed() {
    return this.#span !== null;
  }

  get follow() {
    return this.#follow;
  }

  /** First and last step to ask for, null for all: a little more than is seen, so that lines run to the edges. */
  get wanted() {
    if (!this.#span && !this.#follow) return null;
    const [low, high] = this.range;
    const more = (high - low) / 10;
    const [first, last] = this.#whole;
    return [Math.max(first, Math.floor(low - more)), Math.min(last, Math.ceil(high + more))];
  }

  /** The steps at the edges of the charts. */
  get range() {
    if (this.#span) return this.#span;
    const last = this.#whole[1];
    const first = this.#follow ? Math.max(this.#whole[0], last - this.#follow + 1) : this.#whole[0];
    const pad = Math.max(0.4, (last - first) / 100);
    return [first - pad, last + pad];
  }

  /** The first and the last step that are seen. */
  get seen() {
    const [low, high] = this.range;
    return [Math.max(this.#whole[0], Math.ceil(low)), Math.min(this.#whole[1], Math.floor(high))];
  }

  zoom(low, high) {
    const [first, last] = this.#whole;
    const middle = (low + high) / 2;
    const half = Math.max(NARROWEST, high - low) / 2;
    if (2 * half >= last - first + 1) return this.reset();
    const shift = Math.max(0, first - (middle - half)) - Math.max(0, middle + half - last);
    this.#span = [middle - half + shift, middle + half + shift];
    this.#follow = null;
    this.#tell("range");
  }

  /** Moves by a share of what is seen. */
  pan(share) {
    const [low, high] = this.range;
    this.zoom(low + share * (high - low), high + share * (high - low));
  }

  /** Shows so many times as much. */
  widen(factor) {
    const [low, high] = this.range;
    const middle = this.cursor !== null && this.cursor > low && this.cursor < high ? this.cursor : (low + high) / 2;
    this.zoom(middle - factor * (middle - low), middle + factor * (high - middle));
  }

  reset() {
    this.newest(null);
  }

  /** Follows the newest `count` steps; null for all. */
  newest(count) {
    this.#span = null;
    this.#follow = count;
    this.#tell("range");
  }

  point(step) {
    if (step === this.cursor) return;
    this.cursor = step;
    this.#tell("cursor");
  }
}
