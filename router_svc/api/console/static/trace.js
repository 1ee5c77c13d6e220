// One request: its waterfall, what was decided for it and why, and what the workers measured.

import { attribute, h, reconcile, text } from "./dom.js";
import { DASH, bytes, clock, count, duration } from "./format.js";
import { FINAL_STATES, stepsOf, timesOf } from "./phases.js";
import { request } from "./sse.js";
import { legend, updateWaterfall, waterfall } from "./waterfall.js";

const MEASURED = {
  reserve_s: "wait for blocks",
  prefill_queue_s: "prefill queue",
  prefill_compute_s: "prefill compute",
  transfer_s: "bytes on the wire",
  exposed_s: "not hidden by compute",
  commit_s: "last kernel to commit",
  decode_queue_s: "arrival to first decode step",
  sent_bytes: "sent",
  sent_blocks: "blocks sent",
  chunks: "chunks",
};

/** The pane of one request. `open` shows an id, `follow` takes new states, so that a running request moves. */
export class TracePane {
  constructor() {
    this.id = null;
    this.trace = null;
    this.title = h("h2", { id: "trace-title" });
    this.state = h("span", { class: "state" });
    this.copy = h("button", { type: "button", class: "quiet", on: { click: () => this.onCopy() } }, "Copy JSON");
    this.summary = h("p", { class: "summary" });
    this.error = h("p", { class: "error", role: "alert", hidden: true });
    this.times = h("dl", { class: "times" });
    this.waterfall = waterfall();
    this.decisions = h("ol", { class: "decisions" });
    this.measured = h("dl", { class: "facts" });
    this.body = h(
      "div",
      {},
      this.times,
      this.waterfall,
      h("div", { class: "legend-slot" }, legend()),
      h("h3", {}, "Decisions"),
      this.decisions,
      h("h3", { class: "measured-title" }, "Measured by the workers"),
      this.measured,
    );
    this.empty = h("p", { class: "empty" }, "Choose a request to see where its time went.");
    this.element = h(
      "section",
      { class: "card pane trace", "aria-labelledby": "trace-title" },
      h("header", {}, h("a", { class: "back", href: "#/requests" }, "← All requests"), this.title, this.state, this.copy),
      this.summary,
      this.error,
      this.body,
      this.empty,
    );
    this.open(null);
  }

  /** Shows a request, or none. */
  open(id) {
    if (id === this.id && this.trace) return;
    this.id = id;
    this.trace = null;
    this.seen = null;
    this.empty.hidden = id !== null;
    this.body.hidden = this.summary.hidden = this.error.hidden = this.copy.hidden = true;
    text(this.title, id ?? "Request");
    text(this.state, "");
    if (id !== null) this.load();
  }

  /** Loads the trace again if the list shows that something happened since. */
  follow(brief, now) {
    this.now = now;
    if (this.id === null) return;
    const seen = brief && JSON.stringify([brief.state, brief.attempt, brief.phases, brief.outcome.completion_tokens, brief.retries, brief.fallbacks]);
    if (brief && seen !== this.seen) {
      this.seen = seen;
      this.load();
    } else if (this.trace && !FINAL_STATES.has(this.trace.state)) {
      this.draw();
    }
  }

  async load() {
    const id = this.id;
    if (this.loading === id) return;
    this.loading = id;
    try {
      const response = await request(`v1/requests/${encodeURIComponent(id)}/trace`);
      const trace = await response.json();
      if (id !== this.id) return;
      this.trace = trace;
      this.error.hidden = true;
      this.draw();
    } catch (error) {
      if (id !== this.id) return;
      this.error.hidden = false;
      text(this.error, error.message);
    } finally {
      if (this.loading === id) this.loading = null;
    }
  }

  draw() {
    const { trace } = this;
    this.body.hidden = this.summary.hidden = this.copy.hidden = false;
    text(this.state, trace.state);
    attribute(this.state, "data-state", trace.state);
    text(this.summary, summaryOf(trace));
    if (trace.outcome?.error) {
      this.error.hidden = false;
      text(this.error, trace.outcome.error);
    }
    if (!trace.phases) {
      // The router that served it was lost: only its transitions are known.
      text(this.summary, `${trace.story ?? ""} Its router was lost, so nothing else is known.`);
      this.body.hidden = true;
      return;
    }
    drawTimes(this.times, trace);
    const ticks = trace.chunks.map((chunk) => ({ at: chunk.at, title: `${count(chunk.computed_tokens)} tokens computed at ${duration(chunk.at)}` }));
    updateWaterfall(this.waterfall, stepsOf(trace, this.now ?? trace.accepted_at), ticks.slice(-64));
    drawDecisions(this.decisions, trace);
    drawMeasured(this.measured, trace.reported);
  }

  async onCopy() {
    const json = JSON.stringify(this.trace, null, 2);
    try {
      await navigator.clipboard.writeText(json);
      text(this.copy, "Copied");
    } catch {
      text(this.copy, "Not allowed here");
    }
    setTimeout(() => text(this.copy, "Copy JSON"), 1500);
  }
}

function summaryOf(trace) {
  const cached = trace.outcome?.cached_tokens ? ` (${count(trace.outcome.cached_tokens)} cached)` : "";
  const parts = [
    `${trace.endpoint} at ${clock(trace.accepted_at)}`,
    `${count(trace.prompt_tokens)} prompt tokens${cached} → ${count(trace.outcome?.completion_tokens)} of at most ${count(trace.max_tokens)}`,
  ];
  if (trace.n > 1) parts.push(`${count(trace.n)} choices`);
  if (trace.outcome?.finish_reasons?.length) parts.push(`ended by ${[...new Set(trace.outcome.finish_reasons)].join(", ")}`);
  if (trace.prefilled_by === "decode") parts.push(`prefilled by the decode worker (${(trace.local_prefill_reason ?? "").replaceAll("_", " ")})`);
  if (trace.attempt > 1) parts.push(`attempt ${trace.attempt}`);
  return parts.join(" · ");
}

function drawTimes(list, trace) {
  const times = timesOf(trace);
  const figures = [
    ["TTFT", times.ttft],
    ["Handover gap", times.gap],
    ["TPOT", times.tpot],
    ["Total", times.total],
  ];
  reconcile(
    list,
    figures,
    ([name]) => name,
    ([name]) => h("div", {}, h("dt", {}, name), h("dd")),
    (row, [, value]) => text(row.lastElementChild, duration(value)),
  );
}

function drawDecisions(list, trace) {
  const rows = [
    ...trace.decisions.map((each) => ({ ...each, kind: "choice", what: `${each.tier} on ${each.worker}` })),
    ...trace.retries.map((each) => ({ ...each, kind: "retry", what: `retry: ${each.reason}`, why: incident(each) })),
    ...trace.fallbacks.map((each) => ({ ...each, kind: "fallback", what: `fallback: ${each.reason}`, why: incident(each) })),
  ].sort((a, b) => a.at - b.at);
  reconcile(
    list,
    rows,
    (row) => `${row.kind} ${row.at} ${row.what}`,
    (row) =>
      h(
        "li",
        { "data-kind": row.kind },
        h("span", { class: "at numeric" }, duration(row.at)),
        h("span", { class: "what" }, row.what, row.attempt > 1 ? h("small", {}, `attempt ${row.attempt}`) : null),
        h("span", { class: "why" }, row.why || DASH),
      ),
    () => {},
  );
}

const incident = (each) => [each.worker, each.error].filter(Boolean).join(": ");

function drawMeasured(list, reported) {
  const names = Object.keys(reported ?? {});
  reconcile(
    list,
    names,
    (name) => name,
    (name) => h("div", {}, h("dt", {}, MEASURED[name] ?? name.replaceAll("_", " ")), h("dd")),
    (row, name) => text(row.lastElementChild, measured(name, reported[name])),
  );
  list.hidden = !names.length;
  list.previousElementSibling.hidden = !names.length;
}

function measured(name, value) {
  if (name.endsWith("_s")) return duration(value);
  return name.endsWith("_bytes") ? bytes(value) : count(value);
}
