// Formats of numbers, times and names for the user.

const WHOLE = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const MISSING = "–";

/** Formats a loss, which is null for a step that diverged. */
export function loss(value) {
  if (value === undefined) return MISSING;
  return value === null ? "not a number" : value.toFixed(4);
}

export const whole = (value) => (value == null ? MISSING : WHOLE.format(value));

export function rate(value) {
  if (value == null) return MISSING;
  return value < 10 ? value.toFixed(1) : WHOLE.format(value);
}

export function small(value) {
  if (value == null) return MISSING;
  return value !== 0 && Math.abs(value) < 0.001 ? value.toExponential(2) : String(Number(value.toPrecision(3)));
}

export function bytes(value) {
  if (value == null) return MISSING;
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  const power = value < 1 ? 0 : Math.min(units.length - 1, Math.floor(Math.log2(value) / 10));
  const scaled = value / 1024 ** power;
  return `${power === 0 || scaled >= 100 ? scaled.toFixed(0) : scaled.toFixed(1)} ${units[power]}`;
}

/** Formats gigabytes (10^9 bytes) that are written to SSDs, in the units of their data sheets. */
export function written(gigabytes) {
  if (gigabytes == null) return MISSING;
  const number = (value) => (value < 1000 ? small(value) : WHOLE.format(value));
  return gigabytes < 1000 ? `${number(gigabytes)} GB` : `${number(gigabytes / 1000)} TB`;
}

/** Formats a duration by its two largest units, or by one if that is exact enough. */
export function duration(seconds) {
  const total = Math.max(0, Math.round(seconds));
  const parts = [
    [Math.floor(total / 86400), "d"],
    [Math.floor(total / 3600) % 24, "h"],
    [Math.floor(total / 60) % 60, "min"],
    [total % 60, "s"],
  ];
  const first = parts.findIndex(([count]) => count > 0);
  if (first < 0) return "0 s";
  return parts
    .slice(first, first + (parts[first][0] < 10 ? 2 : 1))
    .filter(([count]) => count > 0)
    .map(([count, unit]) => `${count} ${unit}`)
    .join(" ");
}

export function dateTime(seconds) {
  return new Date(seconds * 1000).toLocaleString([], { dateStyle: "medium", timeStyle: "short" });
}

export function clock(seconds) {
  return new Date(seconds * 1000).toLocaleTimeString([], { hour12: false });
}

/** Formats a hyperparameter's value. */
export function setting(value) {
  if (value === null) return "none";
  if (typeof value === "number" && !Number.isInteger(value)) return small(value);
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

export const words = (name) => name.replaceAll("_", " ");
