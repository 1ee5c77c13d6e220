// The strip of key figures, each with its course over the last ten minutes.

import { attribute, h, svg, text } from "./dom.js";
import { DASH, count, duration, percent, quantile, short } from "./format.js";
import { timesOf } from "./phases.js";

const WIDTH = 100;
const HEIGHT = 24;

/**
 * Label, value and note of each figure. `series` names a column of the history, `each` a value of every request, the
 * oldest first; `atLeast` is the least top of the scale.
 */
const FIGURES = [
  {
    label: "Running",
    series: "running",
    atLeast: 4,
    read: ({ router, tiers }) => [count(router.running), `of ${count(tiers.decode.max_num_seqs)} sequences`],
  },
  {
    label: "Queued",
    series: "queued",
    atLeast: 4,
    read: ({ router, limits }) => [count(router.queued), `limit ${count(limits.max_queued)}`, router.queued >= 8 ? "warn" : null],
  },
  {
    label: "Prefill backlog",
    series: "prefill_queued_tokens",
    atLeast: 256,
    read: ({ tiers, workers }) => [short(tiers.prefill.queued_tokens), backlog(tiers.prefill.queued_tokens, workers)],
  },
  {
    label: "Decode KV",
    series: "decode_kv_use",
    atLeast: 1,
    read: ({ tiers: { decode } }) => {
      const used = decode.total_blocks - decode.free_blocks;
      const use = decode.total_blocks ? used / decode.total_blocks : null;
      return [percent(use), `${short(used)} of ${short(decode.total_blocks)} blocks`, use >= 0.95 ? "warn" : null];
    },
  },
  { label: "TTFT", each: (request) => timesOf(request).ttft, atLeast: 0.01, read: (_, requests) => times(requests, "ttft") },
  { label: "TPOT", each: (request) => timesOf(request).tpot, atLeast: 0.001, read: (_, requests) => times(requests, "tpot") },
  {
    label: "Prefix hits",
    each: (request) => (request.phases.first_token === undefined ? null : request.outcome.cached_tokens / request.prompt_tokens),
    atLeast: 1,
    read: (_, requests) => {
      const started = requests.filter((request) => request.phases.first_token !== undefined);
      const prompt = sum(started, (request) => request.prompt_tokens);
      const cached = sum(started, (request) => request.outcome.cached_tokens);
      return [prompt ? percent(cached / prompt) : DASH, `of ${short(prompt)} tokens`];
    },
  },
  {
    label: "Failed",
    read: (_, requests) => {
      const ended = requests.filter((request) => request.phases.finish !== undefined);
      const failed = ended.filter((request) => request.state === "failed").length;
      return [ended.length ? count(failed) : DASH, `of the last ${count(ended.length)}`, failed ? "warn" : null];
    },
  },
];

/** Creates the figures in `root`. Returns the function that draws a state. */
export function figures(root) {
  const tiles = FIGURES.map((figure) => {
    const value = h("dd", { class: "value" });
    const note = h("dd", { class: "note" });
    const line = svg("path", { class: "line" });
    const area = svg("path", { class: "area" });
    const hasCourse = figure.series !== undefined || figure.each !== undefined;
    const course = hasCourse
      ? svg("svg", { class: "spark", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" }, area, line)
      : null;
    root.append(h("dl", { class: "figure" }, h("dt", {}, figure.label), value, note, course));
    return { figure, value, note, line, area };
  });
  return (state, history, requests) => {
    for (const { figure, value, note, line, area } of tiles) {
      const [shown, detail, level] = figure.read(state, requests);
      text(value, shown);
      text(note, detail);
      attribute(value.parentElement, "data-level", level);
      if (figure.series) draw(line, area, course(history, figure.series), figure.atLeast);
      else if (figure.each) draw(line, area, known(requests, figure.each).reverse(), figure.atLeast);
    }
  };
}

function course({ columns, rows }, name) {
  const index = columns.indexOf(name);
  return rows.map((row) => row[index]);
}

function draw(line, area, values, atLeast) {
  if (values.length < 2) return;
  const top = Math.max(atLeast, ...values);
  const step = WIDTH / (values.length - 1);
  const points = values.map((value, index) => `${(index * step).toFixed(1)} ${(HEIGHT - 1 - (value / top) * (HEIGHT - 2)).toFixed(1)}`);
  const path = `M${points.join("L")}`;
  attribute(line, "d", path);
  attribute(area, "d", `${path}L${WIDTH} ${HEIGHT}L0 ${HEIGHT}Z`);
}

function backlog(tokens, workers) {
  const rates = Object.values(workers)
    .filter((worker) => worker.tier === "prefill" && worker.ready)
    .map((worker) => worker.prefill_tokens_per_s ?? 0);
  const rate = rates.reduce((a, b) => a + b, 0);
  return rate && tokens ? `tokens, ≈ ${duration(tokens / rate)}` : "tokens";
}

function times(requests, name) {
  const values = known(requests, (request) => timesOf(request)[name]);
  return [duration(quantile(values, 0.5)), `p95 ${duration(quantile(values, 0.95))}`];
}

const known = (requests, value) => requests.map(value).filter((each) => each !== null);

const sum = (items, value) => items.reduce((total, item) => total + value(item), 0);
