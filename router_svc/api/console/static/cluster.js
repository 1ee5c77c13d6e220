// The tiers with their workers, and the prefix cache.

import { attribute, h, reconcile, text } from "./dom.js";
import { DASH, bytes, count, percent, plural, short } from "./format.js";
import { VirtualList } from "./virtual_list.js";

const ROW_HEIGHT = 30;
const MAX_ROWS = 12;
/** From this many workers on, a map shows all of them at once, and the list can be searched. */
const MANY = 13;

const pathsOf = (worker) => Object.keys(worker.transport?.paths ?? {}).join(" ");

const kvUse = (worker) => (worker.total_blocks ? 1 - worker.free_blocks / worker.total_blocks : 0);

/** Columns of the list of workers: `sort` is a number or text, larger numbers first. */
const COLUMNS = {
  worker: { title: "Worker", sort: (worker) => worker.worker_id },
  running: { title: "Running", numeric: true, sort: (worker) => worker.running },
  waiting: { title: "Waiting", numeric: true, sort: (worker) => worker.waiting },
  queued: { title: "Queued", hint: "Prompt tokens accepted and not computed", numeric: true, sort: (worker) => worker.queued_tokens },
  kv: { title: "KV use", sort: kvUse },
  path: { title: "Path", hint: "Paths of KV blocks to other workers", sort: pathsOf },
  cached: { title: "Cached", hint: "Blocks in the prefix index", numeric: true, sort: (worker) => worker.cached_blocks },
  rate: { title: "Tok/s", hint: "Measured rate of prompt tokens", numeric: true, sort: (worker) => worker.prefill_tokens_per_s ?? 0 },
};

/** Creates the view, with the card of the latest requests in it. Returns the function that draws a state. */
export function clusterView(root, latest) {
  const tiers = [new Tier("prefill", "Prefill"), new Tier("decode", "Decode")];
  const prefix = new Prefix();
  root.append(
    h("div", { class: "tiers" }, tiers.map((tier) => tier.element)),
    h("div", { class: "below" }, latest, prefix.element),
  );
  return (state) => {
    for (const tier of tiers) tier.show(state);
    prefix.show(state);
  };
}

class Tier {
  constructor(tier, title) {
    this.tier = tier;
    this.sort = "worker";
    this.descending = false;
    this.query = "";
    this.selected = null;
    this.cells = new Map();
    this.counts = h("span", { class: "counts" });
    this.map = h("div", { class: "map", "aria-hidden": "true" });
    this.find = h("input", {
      type: "search",
      placeholder: "Find a worker",
      "aria-label": `Find a ${tier} worker`,
      spellcheck: "false",
      on: { input: () => this.onFind() },
    });
    this.found = h("span", { class: "note", role: "status" });
    const key = h("span", { class: "note" }, "A square is a worker: darker with more KV in use, hollow when not ready.");
    this.tools = h("div", { class: "tools", hidden: true }, this.find, this.found, key);
    this.list = new VirtualList({
      label: `${title} workers`,
      head: this.makeHead(),
      rowHeight: ROW_HEIGHT,
      maxRows: MAX_ROWS,
      keyOf: (worker) => worker.worker_id,
      row: { create: (worker) => this.makeRow(worker), update: updateRow },
    });
    this.empty = h("p", { class: "empty", hidden: true });
    this.detail = h("div", { class: "detail", hidden: true });
    this.map.addEventListener("click", (event) => {
      if (event.target.itemKey) this.select(event.target.itemKey);
    });
    this.element = h(
      "section",
      { class: "card tier", "data-tier": tier, "aria-labelledby": `tier-${tier}` },
      h("header", {}, h("h2", { id: `tier-${tier}` }, title), this.counts),
      this.map,
      this.tools,
      this.list.element,
      this.empty,
      this.detail,
    );
  }

  show(state) {
    this.state = state;
    const load = state.tiers[this.tier];
    const workers = Object.values(state.workers).filter((worker) => worker.tier === this.tier);
    text(this.counts, describe(load, workers));
    const isMissing = !load.ready && (this.tier === "decode" || state.limits.expects_prefill);
    attribute(this.element, "data-level", isMissing ? "bad" : load.ready < workers.length ? "warn" : null);
    this.list.element.hidden = !workers.length;
    this.empty.hidden = workers.length > 0;
    text(this.empty, emptyText(this.tier, state.limits.expects_prefill));
    const isLarge = workers.length >= MANY;
    this.map.hidden = this.tools.hidden = !isLarge;
    if (isLarge) this.drawMap(workers);
    const shown = this.ordered(workers.filter((worker) => worker.worker_id.toLowerCase().includes(this.query)));
    text(this.found, this.query ? `${count(shown.length)} of ${count(workers.length)}` : "");
    this.list.show(shown);
    this.showDetail();
  }

  ordered(workers) {
    const value = COLUMNS[this.sort].sort;
    const sign = this.descending ? -1 : 1;
    const compare = (a, b) => (typeof a === "string" ? ORDER.compare(a, b) : a - b);
    return workers.sort((a, b) => sign * compare(value(a), value(b)) || ORDER.compare(a.worker_id, b.worker_id));
  }

  makeHead() {
    const cells = Object.entries(COLUMNS).map(([name, { title, hint, numeric }]) =>
      h(
        "div",
        { role: "columnheader", class: `c-${name}${numeric ? " numeric" : ""}`, "aria-sort": name === this.sort ? "ascending" : "none" },
        h("button", { type: "button", title: hint, on: { click: (event) => this.onSort(name, event.target.parentElement) } }, title),
      ),
    );
    return h("div", { role: "rowgroup" }, h("div", { role: "row", class: "row head" }, cells));
  }

  onSort(name, cell) {
    this.descending = name === this.sort ? !this.descending : COLUMNS[name].numeric || name === "kv";
    this.sort = name;
    for (const other of cell.parentElement.children) attribute(other, "aria-sort", "none");
    attribute(cell, "aria-sort", this.descending ? "descending" : "ascending");
    this.show(this.state);
  }

  onFind() {
    this.query = this.find.value.trim().toLowerCase();
    this.show(this.state);
  }

  makeRow(worker) {
    const open = h("button", { type: "button", class: "link", on: { click: () => this.select(worker.worker_id) } });
    return h(
      "div",
      { role: "row", class: "row" },
      h("div", { role: "cell", class: "c-worker" }, h("i", { class: "dot", "aria-hidden": "true" }), open, h("span", { class: "mark" })),
      h("div", { role: "cell", class: "c-running numeric" }),
      h("div", { role: "cell", class: "c-waiting numeric" }),
      h("div", { role: "cell", class: "c-queued numeric" }),
      h("div", { role: "cell", class: "c-kv" }, h("div", { class: "meter", "aria-hidden": "true" }, h("i")), h("span", { class: "numeric" })),
      h("div", { role: "cell", class: "c-path" }),
      h("div", { role: "cell", class: "c-cached numeric" }),
      h("div", { role: "cell", class: "c-rate numeric" }),
    );
  }

  drawMap(workers) {
    const sorted = workers.sort((a, b) => ORDER.compare(a.worker_id, b.worker_id));
    reconcile(
      this.map,
      sorted,
      (worker) => worker.worker_id,
      (worker) => h("i", { title: worker.worker_id }),
      (cell, worker) => attribute(cell, "data-use", worker.ready ? Math.min(4, Math.floor(kvUse(worker) * 5)) : "off"),
    );
  }

  select(id) {
    this.selected = this.selected === id ? null : id;
    this.showDetail();
    if (this.selected) this.detail.scrollIntoView({ block: "nearest" });
  }

  showDetail() {
    const worker = this.selected === null ? undefined : this.state.workers[this.selected];
    this.detail.hidden = this.selected === null;
    if (this.selected === null) return;
    const close = h("button", { type: "button", class: "quiet", "aria-label": "Close", on: { click: () => this.select(this.selected) } }, "✕");
    const isSame = this.detail.firstElementChild?.itemKey === this.selected;
    if (!isSame) {
      const head = h("header", {}, h("h3", {}, this.selected), close);
      head.itemKey = this.selected;
      this.detail.replaceChildren(head, h("dl", { class: "facts" }));
    }
    const facts = worker ? Object.entries(worker).filter(([name]) => name !== "worker_id" && name !== "tier") : [["state", "The router no longer knows this worker."]];
    reconcile(
      this.detail.lastElementChild,
      facts,
      ([name]) => name,
      ([name]) => h("div", {}, h("dt", {}, label(name)), h("dd")),
      (row, [name, value]) => text(row.lastElementChild, fact(name, value)),
    );
  }
}

const ORDER = new Intl.Collator("en", { numeric: true });

function updateRow(row, worker) {
  const [id, running, waiting, queued, kv, path, cached, rate] = row.children;
  const [, open, mark] = id.children;
  text(open, worker.worker_id);
  text(mark, markOf(worker));
  attribute(row, "data-level", worker.ready ? (markOf(worker) ? "warn" : null) : "bad");
  text(running, worker.tier === "decode" ? `${count(worker.running)} / ${count(worker.max_num_seqs)}` : count(worker.running));
  text(waiting, count(worker.waiting));
  attribute(waiting, "data-level", worker.waiting ? "warn" : null);
  text(queued, short(worker.queued_tokens));
  const use = worker.ready ? kvUse(worker) : 0;
  kv.firstElementChild.firstElementChild.style.width = `${100 * use}%`;
  attribute(kv, "data-level", use >= 0.95 ? "bad" : use >= 0.8 ? "warn" : null);
  text(kv.lastElementChild, worker.ready ? percent(use) : DASH);
  text(path, pathsOf(worker) || DASH);
  text(cached, short(worker.cached_blocks));
  text(rate, short(worker.prefill_tokens_per_s ?? null));
}

/** What is not as it should be with a worker, in a word. */
function markOf(worker) {
  if (!worker.ready) return "not ready";
  return worker.transport?.degraded ? "slow path" : "";
}

function describe(load, workers) {
  const ready = `${count(load.ready)} of ${count(workers.length)} ready`;
  const use = load.total_blocks ? `, KV ${percent(1 - load.free_blocks / load.total_blocks)} of ${short(load.total_blocks)} blocks` : "";
  return ready + use;
}

function emptyText(tier, expectsPrefill) {
  if (tier === "decode") return "No decode worker is registered, so requests are refused. Start one, or check that it reaches Redis.";
  return expectsPrefill
    ? "No prefill worker is registered. Decode workers compute the prompts meanwhile."
    : "This cluster has no prefill tier (--prefill-expected 0): decode workers compute the prompts.";
}

const label = (name) => name.replaceAll("_", " ").replace(/ per s$/, "/s");

function fact(name, value) {
  if (value === null || value === "") return DASH;
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (typeof value === "number") {
    if (name === "epoch") return String(value);
    return name.endsWith("_bytes") ? bytes(value) : count(value);
  }
  if (name === "transport") return transportText(value);
  return typeof value === "string" ? value : JSON.stringify(value);
}

/** cma: 2 peers, tcp: 1 peer. Why it is slower than it should be. */
function transportText({ paths, degraded }) {
  const found = Object.entries(paths ?? {}).map(([path, peers]) => `${path}: ${plural(peers, "peer")}`);
  return [found.join(", ") || "no peer connected yet", degraded].filter(Boolean).join(". ");
}

class Prefix {
  constructor() {
    this.facts = h("dl", { class: "facts" });
    this.element = h(
      "section",
      { class: "card", "aria-labelledby": "prefix-cache" },
      h("header", {}, h("h2", { id: "prefix-cache" }, "Prefix cache"), h("span", { class: "counts" })),
      this.facts,
    );
  }

  show(state) {
    const { prefix, workers } = state;
    const held = { prefill: 0, decode: 0 };
    for (const worker of Object.values(workers)) held[worker.tier] += worker.cached_blocks ?? 0;
    const isCurrent = prefix.current;
    text(this.element.querySelector(".counts"), isCurrent ? "index is current" : "index is not updated: Redis cannot be read");
    attribute(this.element, "data-level", isCurrent ? null : "warn");
    const facts = [
      ["Distinct blocks", count(prefix.blocks)],
      ["Copies in prefill workers", count(held.prefill)],
      ["Copies in decode workers", count(held.decode)],
      ["Copies per block", prefix.blocks ? (prefix.copies / prefix.blocks).toFixed(2) : DASH],
    ];
    if (prefix.dropped) facts.push(["Dropped, index full", count(prefix.dropped)]);
    reconcile(
      this.facts,
      facts,
      ([name]) => name,
      ([name]) => h("div", {}, h("dt", {}, name), h("dd")),
      (row, [, value]) => text(row.lastElementChild, value),
    );
  }
}
