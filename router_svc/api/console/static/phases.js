// A request's time, divided into the phases queue, reserve, prefill, wire and decode.

export const PHASES = ["queue", "reserve", "prefill", "wire", "decode"];

export const FINAL_STATES = new Set(["finished", "failed", "cancelled"]);

/**
 * Consecutive segments { phase, start, end, open } in seconds since the request was accepted; `now` ends an open one.
 * A phase that took no time is among them: it was passed through.
 */
export function segmentsOf(record, now) {
  const starts = record.timeline ?? [];
  const finish = record.phases.finish;
  const last = finish ?? now - record.accepted_at;
  return starts.map(({ phase, at }, index) => {
    const next = starts[index + 1];
    return { phase, start: at, end: Math.max(next ? next.at : last, at), open: !next && finish === undefined };
  });
}

/** Bars of the waterfall: one per step, which may overlap. `where` is the worker that was busy. */
export function stepsOf(trace, now) {
  const known = { start: 0, ...trace.phases };
  const [prefill, decode] = ["prefill", "decode"].map((tier) => lastChoice(trace, tier));
  const isLocal = trace.prefilled_by === "decode" && known.prefill_start === undefined;
  const steps = isLocal ? LOCAL_STEPS : STEPS;
  const places = { router: "router", prefill, decode, wire: prefill && decode ? `${prefill} → ${decode}` : "" };
  const bars = [];
  for (const [name, phase, where, starts, end] of steps) {
    const start = starts.map((event) => known[event]).find((at) => at !== undefined);
    if (start === undefined || known[end] === undefined) continue;
    // After a retry an event may keep its first time, which can precede the one it usually follows.
    bars.push({ name, phase, where: places[where] ?? "", start: Math.min(start, known[end]), end: known[end] });
  }
  const isFinal = FINAL_STATES.has(trace.state);
  if (!isFinal || !bars.some((bar) => bar.name === "decode")) {
    const open = segmentsOf(trace, now).at(-1);
    if (open && (open.open || !bars.some((bar) => bar.end >= open.end))) bars.push({ name: isFinal ? "until the end" : `${open.phase} (running)`, phase: open.phase, where: "", start: open.start, end: open.end });
  }
  return bars;
}

const lastChoice = (trace, tier) => trace.decisions?.findLast((decision) => decision.tier === tier)?.worker ?? "";

/** Name, phase, where, events it may start with (the first one known counts), event that ends it. */
const STEPS = [
  ["queue", "queue", "router", ["start"], "admitted"],
  ["reserve", "reserve", "decode", ["admitted"], "reserved"],
  ["dispatch", "dispatch", "prefill", ["reserved"], "prefill_start"],
  ["prefill", "prefill", "prefill", ["prefill_start", "reserved", "admitted"], "first_token"],
  ["first write", "write", "router", ["first_token"], "first_write"],
  ["wire", "wire", "wire", ["first_token"], "commit"],
  ["first decode", "first-decode", "decode", ["commit", "first_token"], "first_decode"],
  ["decode", "decode", "decode", ["first_decode", "first_token"], "finish"],
];

/** The same when a decode worker did everything. */
const LOCAL_STEPS = [
  ["queue", "queue", "router", ["start"], "admitted"],
  ["local prefill", "prefill", "decode", ["admitted"], "first_token"],
  ["first write", "write", "router", ["first_token"], "first_write"],
  ["decode", "decode", "decode", ["first_token"], "finish"],
];

/** TTFT, handover gap, TPOT and total in seconds, null while unknown. */
export function timesOf(record) {
  const { phases, outcome } = record;
  const ttft = phases.first_write ?? phases.first_token ?? null;
  const each = (outcome?.completion_tokens ?? 0) / Math.max(record.n ?? 1, 1);
  const isWhole = phases.finish !== undefined && ttft !== null && each > 1;
  const hasGap = record.prefilled_by === "prefill" && phases.first_decode !== undefined && phases.first_token !== undefined;
  return {
    ttft,
    gap: hasGap ? Math.max(phases.first_decode - phases.first_token, 0) : null,
    tpot: isWhole ? (phases.finish - ttft) / (each - 1) : null,
    total: phases.finish ?? null,
  };
}
