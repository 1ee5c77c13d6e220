// The list of recent requests, each with its strip of phases.

import { attribute, h, reconcile, roving, text } from "./dom.js";
import { clock, count, duration } from "./format.js";
import { FINAL_STATES, timesOf } from "./phases.js";
import { legend, strip, updateStrip } from "./waterfall.js";

const FILTERS = {
  all: { title: "All", holds: () => true },
  running: { title: "Running", holds: (request) => !FINAL_STATES.has(request.state) },
  failed: { title: "Failed", holds: (request) => request.state === "failed" },
  incidents: { title: "With retries or fallbacks", holds: (request) => request.retries.length + request.fallbacks.length > 0 },
};

/** The requests of a state, the latest first. */
export const newest = (state) => Object.values(state.requests).sort((a, b) => b.accepted_at - a.accepted_at);

/** A list of requests; each links to its trace. `limit` bounds it. */
export class RequestList {
  constructor({ limit = Infinity, label }) {
    this.limit = limit;
    this.rows = h("ol", { class: "requests", "aria-label": label });
    this.refreshTabOrder = roving(this.rows, "a");
    this.element = this.rows;
  }

  show(requests, now, selected = null) {
    reconcile(
      this.rows,
      requests.slice(0, this.limit),
      (request) => request.request_id,
      makeRow,
      (row, request) => updateRow(row, request, now, selected),
    );
    this.refreshTabOrder();
  }
}

function makeRow(request) {
  return h(
    "li",
    {},
    h(
      "a",
      { href: `#/requests/${encodeURIComponent(request.request_id)}` },
      h("time", { class: "at" }, clock(request.accepted_at)),
      h("span", { class: "id", title: request.request_id }, request.request_id.replace(/^(chatcmpl|cmpl|gen)-/, "")),
      h("span", { class: "state" }),
      h("span", { class: "tokens numeric" }),
      h("span", { class: "ttft numeric" }),
      h("span", { class: "total numeric" }),
      strip(),
    ),
  );
}

function updateRow(row, request, now, selected) {
  const link = row.firstElementChild;
  const [, , state, tokens, ttft, total, phases] = link.children;
  const incidents = request.retries.length + request.fallbacks.length;
  text(state, incidents ? `${request.state} *` : request.state);
  attribute(state, "data-state", request.state);
  state.title = incidents ? [...request.retries.map((why) => `retry: ${why}`), ...request.fallbacks.map((why) => `fallback: ${why}`)].join(", ") : "";
  text(tokens, `${count(request.prompt_tokens)} → ${count(request.outcome.completion_tokens)}`);
  const times = timesOf(request);
  text(ttft, duration(times.ttft));
  text(total, duration(times.total ?? now - request.accepted_at));
  attribute(link, "aria-current", request.request_id === selected ? "true" : null);
  updateStrip(phases, request, now);
}

/** The heads of the columns. */
export function listHead() {
  return h(
    "div",
    { class: "requests-head", "aria-hidden": "true" },
    ["Time", "Request", "State", "Tokens", "TTFT", "Total"].map((title, index) => h("span", { class: index > 2 ? "numeric" : "" }, title)),
    legend(),
  );
}

/** The pane with filters and the list. Returns its element and the function that draws a state. */
export function requestsPane() {
  const list = new RequestList({ label: "Recent requests" });
  const empty = h("p", { class: "empty" });
  const filter = h(
    "select",
    { "aria-label": "Which requests" },
    Object.entries(FILTERS).map(([name, { title }]) => h("option", { value: name }, title)),
  );
  const find = h("input", { type: "search", placeholder: "Id or worker", "aria-label": "Find by id or worker", spellcheck: "false" });
  const hold = h("button", { type: "button", class: "quiet", "aria-pressed": "false" }, "Pause");
  const held = { requests: null };
  let last = null;
  const show = (state, now, selected) => {
    last = { state, now, selected };
    const query = find.value.trim().toLowerCase();
    const holds = FILTERS[filter.value].holds;
    const all = held.requests ?? newest(state);
    const shown = all.filter((request) => holds(request) && matches(request, query));
    text(empty, all.length ? "No recent request matches." : "No request yet. Send one, or try the playground.");
    empty.hidden = shown.length > 0;
    list.show(shown, now, selected);
  };
  const redraw = () => last && show(last.state, last.now, last.selected);
  filter.addEventListener("change", redraw);
  find.addEventListener("input", redraw);
  hold.title = "Keep the list as it is while you read it";
  hold.addEventListener("click", () => {
    held.requests = held.requests ? null : newest(last.state);
    hold.setAttribute("aria-pressed", String(held.requests !== null));
    redraw();
  });
  const element = h(
    "section",
    { class: "card pane", "aria-labelledby": "recent-requests" },
    h("header", {}, h("h2", { id: "recent-requests" }, "Recent requests"), h("div", { class: "tools" }, filter, find, hold)),
    listHead(),
    list.element,
    empty,
  );
  return { element, show };
}

const matches = (request, query) =>
  !query || request.request_id.toLowerCase().includes(query) || request.workers.some((worker) => worker.toLowerCase().includes(query));
