// The state of the cluster, kept current by the router's stream. Reconnects with growing pauses.

import { ApiError, asksForKey, events, request } from "./sse.js";

const FIRST_PAUSE_S = 1;
const LONGEST_PAUSE_S = 15;
/** Without an event for this many intervals the connection counts as dead. */
const SILENT_INTERVALS = 8;
/** A page that is not seen gives its slot back after this time. */
const HIDDEN_S = 60;
const HISTORY_ROWS = 120;

/** Fires "change" whenever `state`, `history` or `connection` changed. */
export class Feed extends EventTarget {
  constructor() {
    super();
    this.state = null;
    this.history = { columns: [], rows: [] };
    /** What the page says about the connection: { kind: connecting | live | lost, message, status, retryAt }.
     * Without `retryAt` it is for the reader to do something. */
    this.connection = { kind: "connecting" };
    /** Server time minus the page's clock, in seconds. */
    this.offsetS = 0;
    this.receivedAt = null;
    this.intervalS = 1;
    this.version = 0;
    this.failures = 0;
    this.hiddenTimer = null;
    document.addEventListener("visibilitychange", () => this.onVisibility());
  }

  /** Unix time by the router's clock. */
  now() {
    return Date.now() / 1000 + this.offsetS;
  }

  /** Seconds since the last event; null before the first. */
  ageS() {
    return this.receivedAt === null ? null : (performance.now() - this.receivedAt) / 1000;
  }

  /** Connects now, whatever pause there was. */
  connect() {
    clearTimeout(this.retryTimer);
    this.abort?.abort();
    const abort = (this.abort = new AbortController());
    this.read(abort.signal).then(
      () => this.onEnd(abort, null),
      (error) => this.onEnd(abort, error),
    );
  }

  async read(signal) {
    const response = await request("console/events", { signal });
    this.watch();
    for await (const { event, data } of events(response)) {
      if (signal.aborted) return;
      this.take(event, JSON.parse(data));
      this.watch();
    }
  }

  take(event, message) {
    if (event === "state") {
      this.state = merged(null, message.state);
      this.history = message.history;
      this.intervalS = message.interval_s;
    } else if (message.version === this.version + 1) {
      this.state = merged(this.state, message.patch);
      if (message.sample) {
        const rows = [...this.history.rows, message.sample].slice(-HISTORY_ROWS);
        this.history = { columns: this.history.columns, rows };
      }
    } else {
      throw new Error(`State ${message.version} follows ${this.version}.`);
    }
    this.version = message.version;
    this.offsetS = message.now - Date.now() / 1000;
    this.receivedAt = performance.now();
    this.failures = 0;
    this.connection = { kind: "live" };
    this.changed();
  }

  /** Takes silence as the end of the connection: a host that vanished closes nothing. */
  watch() {
    clearTimeout(this.silenceTimer);
    const abort = this.abort;
    this.silenceTimer = setTimeout(() => {
      abort.abort();
      this.onEnd(abort, new Error("It has been silent."));
    }, SILENT_INTERVALS * this.intervalS * 1000);
  }

  onEnd(abort, error) {
    if (abort !== this.abort) return;
    this.abort = null;
    clearTimeout(this.silenceTimer);
    if (error === null && this.connection.kind === "live") {
      // The router ends each stream after a while.
      this.connection = { kind: "connecting" };
      this.connect();
      return;
    }
    const isAnswer = error instanceof ApiError;
    // The same key gets the same answer, and each try is a line of the router's audit log.
    const retries = !(isAnswer && asksForKey(error.status));
    const pause = isAnswer && error.retryAfterS ? error.retryAfterS : Math.min(FIRST_PAUSE_S * 2 ** this.failures, LONGEST_PAUSE_S);
    const pauseS = pause * (1 + Math.random() / 4);
    this.failures += 1;
    this.connection = {
      kind: "lost",
      status: isAnswer ? error.status : null,
      message: isAnswer ? error.message : null,
      retryAt: retries ? performance.now() + pauseS * 1000 : null,
    };
    if (retries) this.retryTimer = setTimeout(() => this.connect(), pauseS * 1000);
    this.changed();
  }

  onVisibility() {
    clearTimeout(this.hiddenTimer);
    if (document.hidden) {
      this.hiddenTimer = setTimeout(() => this.rest(), HIDDEN_S * 1000);
    } else if (!this.abort && this.connection.retryAt !== null) {
      this.connect();
    }
  }

  rest() {
    clearTimeout(this.retryTimer);
    clearTimeout(this.silenceTimer);
    const abort = this.abort;
    this.abort = null;
    abort?.abort();
  }

  changed() {
    this.dispatchEvent(new Event("change"));
  }
}

/** A JSON merge patch applied to a copy. Objects have no prototype, so that an id such as `__proto__` is only a name. */
function merged(target, patch) {
  if (patch === null || typeof patch !== "object" || Array.isArray(patch)) return patch;
  const result = Object.assign(Object.create(null), isPlain(target) ? target : null);
  for (const [key, value] of Object.entries(patch)) {
    if (value === null) delete result[key];
    else result[key] = merged(result[key], value);
  }
  return result;
}

const isPlain = (value) => value !== null && typeof value === "object" && !Array.isArray(value);
