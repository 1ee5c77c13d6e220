// Numbers, times and durations as text. An unknown value is a dash.

const WHOLE = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const CLOCK = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });

export const DASH = "–";

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

/** 1,234 */
export const count = (value) => (isNumber(value) ? WHOLE.format(value) : DASH);

/** 1,234 or 12.3k or 4.56M: at most five characters. */
export function short(value) {
  if (!isNumber(value)) return DASH;
  if (Math.abs(value) < 10_000) return WHOLE.format(value);
  const [scale, unit] = Math.abs(value) < 999_500 ? [1e3, "k"] : [1e6, "M"];
  const scaled = value / scale;
  return scaled.toFixed(Math.abs(scaled) < 99.5 ? 1 : 0) + unit;
}

/** 42 % */
export const percent = (share) => (isNumber(share) ? `${Math.round(share * 100)} %` : DASH);

/** 0.42 ms, 12.3 ms, 345 ms, 1.23 s, 12.3 s, 2 min 5 s */
export function duration(seconds) {
  if (!isNumber(seconds)) return DASH;
  const ms = seconds * 1000;
  if (ms < 9.995) return `${ms.toFixed(2)} ms`;
  if (ms < 99.95) return `${ms.toFixed(1)} ms`;
  if (ms < 999.5) return `${ms.toFixed(0)} ms`;
  if (seconds < 9.995) return `${seconds.toFixed(2)} s`;
  if (seconds < 59.95) return `${seconds.toFixed(1)} s`;
  const whole = Math.round(seconds);
  return `${Math.floor(whole / 60)} min ${whole % 60} s`;
}

/** 14:02:31, in the reader's time zone */
export const clock = (unixSeconds) => (isNumber(unixSeconds) ? CLOCK.format(new Date(unixSeconds * 1000)) : DASH);

/** 4.0 KiB, 12.3 MiB */
export function bytes(value) {
  if (!isNumber(value)) return DASH;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let index = 0;
  while (value >= 1024 && index < units.length - 1) {
    value /= 1024;
    index += 1;
  }
  return `${value.toFixed(index ? 1 : 0)} ${units[index]}`;
}

/** The value below which a share of the numbers lies; null without numbers. */
export function quantile(values, share) {
  if (!values.length) return null;
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))];
}

export const plural = (number, one, many = `${one}s`) => `${count(number)} ${number === 1 ? one : many}`;

/** The names of the router's models. */
export function modelsOf(state) {
  return (state.router.models ?? [state.router]).map((each) => each.model);
}
