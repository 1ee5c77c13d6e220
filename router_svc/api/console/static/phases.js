// A request's time, divided into the phases queue, reserve, prefill, wire and decode.

export const PHASES = ["queue", "reserve", "prefill", "wire", "decode"];

export const FINAL_STATES = new Set(["finished", "failed", "cancelled"]);

/** Phases by the event that ends each of them; decode ends with the request. */
const ENDS = [
  ["queue", "admitted"],
  ["reserve", "reserved"],
  ["prefill", "first_token"],
  ["wire", "commit"],
];

/** Consecutive segments { phase, start, end, open } in seconds since the request was accepted; `now` ends an open one. */
export function segmentsOf(record, now) {
  const { phases } = record;
  const isLocal = record.prefilled_by === "decode" && phases.prefill_start === undefined;
  // A decode worker that prefills reports its reservation together with the first token.
  const ends = ENDS.filter(([phase]) => !isLocal || (phase !== "reserve" && phase !== "wire"));
  let last = -1;
  ends.forEach(([, event], index) => {
    if (phases[event] !== undefined) last = index;
  });
  const segments = [];
  let cursor = 0;
  for (const [phase, event] of ends.slice(0, last + 1)) {
    const end = Math.max(cursor, phases[event] ?? cursor);
    if (end > cursor) segments.push({ phase, start: cursor, end, open: false });
    cursor = end;
  }
  const end = phases.finish ?? now - record.accepted_at;
  if (end > cursor) segments.push({ phase: phaseAfter(record, ends, last), start: cursor, end, open: phases.finish === undefined });
  return segments;
}

function phaseAfter(record, ends, last) {
  const next = ends[last + 1]?.[0];
  if (next === undefined) return "decode";
  // Without a commit there was no handover: the first token was the last, or decode workers never had the request.
  if (next === "wire" && (record.state === "finished" || record.prefilled_by !== "prefill")) return "decode";
  return next;
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
    const isNew = open && (open.open || !bars.some((bar) => bar.end >= open.end));
    if (isNew) bars.push({ name: isFinal ? "until the end" : `${open.phase} (running)`, phase: open.phase, where: "", start: open.start, end: open.end });
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
