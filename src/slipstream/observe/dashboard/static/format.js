// Numbers, durations and text as people read them.

const MISSING = "–";

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

let ahead = 0; // seconds by which the server's clock is ahead of the browser's

/** The server's clock, in Unix seconds. */
export const now = () => Date.now() / 1000 + ahead;

/** Note what time it is at the server, if it says so. */
export function setNow(time) {
  if (isNumber(time)) ahead = time - Date.now() / 1000;
}

/** Four significant digits at most: 0.0312, 12.3, 1,234. */
export function number(value, digits = 3) {
  if (!isNumber(value)) return MISSING;
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size < 1e-4) return value.toExponential(1).replace(".0", "");
  if (size >= 1000) return Math.round(value).toLocaleString("en-US");
  return String(Number(value.toPrecision(digits)));
}

/** A number with fixed decimals, so that a column of them is aligned. */
export function fixed(value, decimals = 3) {
  return isNumber(value) ? value.toFixed(decimals) : MISSING;
}

export function signed(value, decimals = 3) {
  return isNumber(value) ? (value > 0 ? "+" : value < 0 ? "−" : "") + Math.abs(value).toFixed(decimals) : MISSING;
}

export function integer(value) {
  return isNumber(value) ? Math.round(value).toLocaleString("en-US") : MISSING;
}

/** A share as a label of an axis. */
export function percentLabel(value, step) {
  return percent(value, decimalsOf(100 * step));
}

/** Decimals that tell multiples of `step` apart. */
function decimalsOf(step) {
  for (let decimals = 0; decimals < 8; decimals += 1) {
    const scaled = step * 10 ** decimals;
    if (Math.abs(scaled - Math.round(scaled)) < 1e-6 * scaled) return decimals;
  }
  return 8;
}

export function percent(value, decimals = 0) {
  return isNumber(value) ? `${(100 * value).toFixed(decimals)} %` : MISSING;
}

/** 1.2k, 3.4M: for axes and narrow columns. On an axis, `step` is the distance of its labels. */
export function compact(value, step = null) {
  if (!isNumber(value)) return MISSING;
  if (step !== null && Math.abs(value) < 1000) return value.toFixed(decimalsOf(step));
  for (const [size, unit] of [
    [1e9, "G"],
    [1e6, "M"],
    [1e3, "k"],
  ])
    if (Math.abs(value) >= size) return `${Number((value / size).toPrecision(3))}${unit}`;
  return number(value);
}

export function bytes(value) {
  return isNumber(value) ? `${compact(value)}B`.replace(/(?=[kMG]?B$)/, " ") : MISSING;
}

/** Seconds in the unit that suits them: 12 µs, 3.4 ms, 1.2 s, 4 min 10 s, 2 h 05 min. */
export function duration(seconds) {
  if (!isNumber(seconds)) return MISSING;
  const size = Math.abs(seconds);
  if (size === 0) return "0 s";
  if (size < 1e-3) return `${number(seconds * 1e6)} µs`;
  if (size < 1) return `${number(seconds * 1e3)} ms`;
  if (size < 100) return `${number(seconds)} s`;
  const total = Math.round(size);
  if (total < 3600) return `${Math.floor(total / 60)} min ${String(total % 60).padStart(2, "0")} s`;
  return `${Math.floor(total / 3600)} h ${String(Math.floor((total % 3600) / 60)).padStart(2, "0")} min`;
}

const coarse = (seconds) => (seconds < 100 || seconds >= 3600 ? duration(seconds) : `${Math.round(seconds / 60)} min`);

/** How long ago, from Unix seconds. */
export function ago(time) {
  if (!isNumber(time)) return MISSING;
  const seconds = now() - time;
  return seconds < 2 ? "just now" : `${coarse(Math.round(seconds))} ago`;
}

export function clock(time) {
  return isNumber(time) ? new Date(1000 * time).toLocaleTimeString("en-GB") : MISSING;
}

export function plural(count, word) {
  return `${integer(count)} ${word}${count === 1 ? "" : "s"}`;
}

// Characters that draw nothing, move the cursor or change the direction of text, except for the line feed.
const INVISIBLE =
  /[\u0000-\u0009\u000b-\u001f\u007f-\u00a0\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180e\u200b-\u200f\u2028-\u202f\u205f-\u206f\u3164\ufeff\uffa0\ufff0-\ufffb]|[\u{e0000}-\u{e0fff}]/gu;

/** Text whose control, invisible and direction characters are shown by their numbers: ‹202E› for a right-to-left override. */
export function visible(text) {
  return text.replace(
    INVISIBLE,
    (character) => `‹${character.codePointAt(0).toString(16).toUpperCase().padStart(2, "0")}›`,
  );
}

/** The same in one line, with ↵ for a line feed. */
export function oneLine(text, length = 200) {
  const short = text.length > length ? `${text.slice(0, length)}…` : text;
  return visible(short).replaceAll("\n", "↵");
}
