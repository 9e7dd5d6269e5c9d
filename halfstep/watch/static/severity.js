// How bad alerts are: the words, from the worst, and how each looks.

/** Of each severity: its mark for charts, its sign for text, and its colour. */
export const SEVERITIES = {
  error: { symbol: "diamond", sign: "◆", color: "bad" },
  warning: { symbol: "triangle-up", sign: "▲", color: "open" },
  note: { symbol: "circle", sign: "●", color: "soft" },
};
const WORDS = Object.keys(SEVERITIES);

/** The severity of an alert; a word that nobody knows is a note. */
export function severityOf({ severity }) {
  return WORDS.includes(severity) ? severity : "note";
}

/** How many alerts there are of each severity. */
export function numbersOf(alerts) {
  const numbers = Object.fromEntries(WORDS.map((word) => [word, 0]));
  for (const alert of alerts) numbers[severityOf(alert)] += 1;
  return numbers;
}

/** The look of the worst of some alerts. */
export function worstLook(alerts) {
  return SEVERITIES[severityOf(worstOf(alerts))];
}

/** Of alerts, the worst; the newest of several. */
export function worstOf(alerts) {
  const badness = (alert) => WORDS.length - WORDS.indexOf(severityOf(alert));
  return alerts.reduce((worst, alert) => {
    const more = badness(alert) - badness(worst) || (alert.time ?? 0) - (worst.time ?? 0);
    return more >= 0 ? alert : worst;
  });
}
