// A chat with a served model: ordinary API requests, with times and phases under each answer.

import { attribute, grow, h, text } from "./dom.js";
import { Call, Thinking } from "./folds.js";
import { count, duration, modelsOf } from "./format.js";
import { FINAL_STATES } from "./phases.js";
import { events, request } from "./sse.js";
import { legend, strip, updateStrip } from "./waterfall.js";

const TRACE_TRIES = 10;
const TRACE_PAUSE_MS = 150;

/** Creates the view. Returns the function that takes a state. */
export function playgroundView(root) {
  const chat = new Chat();
  root.append(chat.element);
  return (state) => chat.show(state);
}

class Chat {
  constructor() {
    this.models = h("select");
    this.modelField = field("Model", this.models);
    /** The conversation as the API takes it. It is nowhere but in this page. */
    this.messages = [];
    /** Calls of the last answer, whose results go with the next message. */
    this.calls = [];
    this.abort = null;
    this.log = h("div", { class: "log", role: "log", "aria-label": "Conversation", tabindex: "0" });
    this.empty = h("p", { class: "empty" }, "Ask something. The conversation stays in this page: the router keeps no text.");
    this.log.append(this.empty);
    this.input = h("textarea", {
      id: "prompt",
      rows: "3",
      placeholder: "Message",
      "aria-label": "Message",
      on: { keydown: (event) => this.onKey(event) },
    });
    this.send = h("button", { type: "submit", class: "primary" }, "Send");
    this.stop = h("button", { type: "button", class: "stop", hidden: true, on: { click: () => this.abort?.abort() } }, "Stop");
    this.clear = h("button", { type: "button", class: "quiet", on: { click: () => this.restart() } }, "New conversation");
    this.system = h("textarea", { rows: "2", placeholder: "None" });
    this.tools = h("textarea", { rows: "2", placeholder: "None", spellcheck: "false" });
    this.temperature = number("0.7", "0", "2", "0.1");
    this.maxTokens = number("256", "1", "1000000", "1");
    this.form = h(
      "form",
      { id: "composer", class: "composer", on: { submit: (event) => this.onSubmit(event) } },
      this.input,
      h("div", { class: "buttons" }, h("span", { class: "note" }, "Enter sends, Shift+Enter breaks the line"), this.clear, this.stop, this.send),
    );
    this.element = h(
      "div",
      { class: "playground" },
      h("section", { class: "card chat", "aria-label": "Chat" }, this.log, this.form),
      h(
        "section",
        { class: "card settings", "aria-labelledby": "settings" },
        h("header", {}, h("h2", { id: "settings" }, "Settings")),
        this.modelField,
        field("System message", this.system),
        field("Tools (a JSON list)", this.tools),
        field("Temperature", this.temperature),
        field("Maximum tokens", this.maxTokens),
        h("p", { class: "note" }, "Requests go to /v1/chat/completions like those of any client, and count like them."),
      ),
    );
  }

  show(state) {
    const names = modelsOf(state);
    if (names.join() === [...this.models.options].map((option) => option.value).join()) return;
    const chosen = this.model;
    this.models.replaceChildren(...names.map((name) => h("option", { value: name }, name)));
    if (names.includes(chosen)) this.models.value = chosen;
    this.modelField.hidden = names.length < 2;
  }

  /** The name of the model that answers. */
  get model() {
    return this.models.value;
  }

  restart() {
    this.abort?.abort();
    this.messages = [];
    this.calls = [];
    this.log.replaceChildren(this.empty);
    this.input.focus();
  }

  onKey(event) {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      this.form.requestSubmit();
    }
  }

  onSubmit(event) {
    event.preventDefault();
    const content = this.input.value;
    const hasContent = content.trim() !== "";
    if (this.abort || !(hasContent || this.calls.length)) return;
    this.empty.remove();
    const added = this.calls.map((call) => call.answer);
    if (hasContent) {
      added.push({ role: "user", content });
      this.log.append(h("article", { class: "turn user" }, h("h3", {}, "You"), h("div", { class: "text" }, content)));
    }
    this.input.value = "";
    this.answer(added);
  }

  /** Streams the answer to further messages into the conversation. */
  async answer(added) {
    const { messages } = this;
    const turn = new Turn(this.model);
    this.log.append(turn.element);
    this.abort = new AbortController();
    this.setBusy(true);
    try {
      await turn.run(() => this.body(added), this.abort.signal, () => this.followEnd());
    } finally {
      this.abort = null;
      this.setBusy(false);
    }
    // Without an answer, the next question would follow another one, which templates refuse.
    if (!turn.isEmpty && messages === this.messages) {
      messages.push(...added, turn.message);
      for (const call of this.calls) call.close();
      this.calls = turn.openCalls;
      for (const call of this.calls) call.open();
    }
    await turn.showPhases();
    this.followEnd();
  }

  /** The request that adds messages to the conversation. Throws an error that says what is wrong with the tools. */
  body(added) {
    const system = this.system.value.trim();
    const body = {
      model: this.model,
      messages: [...(system ? [{ role: "system", content: system }] : []), ...this.messages, ...added],
      stream: true,
      stream_options: { include_usage: true },
    };
    // What is left empty is the model's default; what is wrong is for the API to say.
    if (this.temperature.value !== "") body.temperature = Number(this.temperature.value);
    if (this.maxTokens.value !== "") body.max_tokens = Number(this.maxTokens.value);
    if (this.tools.value.trim()) body.tools = parsedTools(this.tools.value);
    return body;
  }

  setBusy(isBusy) {
    this.stop.hidden = !isBusy;
    this.send.hidden = isBusy;
    attribute(this.log, "aria-busy", isBusy ? "true" : null);
    if (isBusy && document.activeElement === this.send) this.stop.focus();
    else if (!isBusy && (document.activeElement === document.body || document.activeElement === this.stop)) this.input.focus();
  }

  /** Keeps the end in view unless the reader has scrolled away. */
  followEnd() {
    const { scrollHeight, scrollTop, clientHeight } = this.log;
    if (scrollHeight - scrollTop - clientHeight < 120) this.log.scrollTop = scrollHeight;
  }
}

/** One answer: its thinking, its text, its calls, and below them what it took. */
class Turn {
  constructor(model) {
    this.content = "";
    this.thinking = null;
    /** By index. */
    this.calls = new Map();
    this.wasStopped = false;
    this.id = null;
    this.text = h("div", { class: "text" });
    this.status = h("p", { class: "note took" }, "waiting for the first token");
    this.error = h("p", { class: "error", role: "alert", hidden: true });
    this.phases = h("div", { class: "phases", hidden: true });
    this.element = h("article", { class: "turn assistant" }, h("h3", {}, model), this.text, this.error, this.status, this.phases);
  }

  /** Nothing of an answer has arrived. */
  get isEmpty() {
    return !this.content && this.thinking === null && this.calls.size === 0;
  }

  /** The calls that can have a result: not those that were cut, and none of an answer that was stopped. */
  get openCalls() {
    return this.wasStopped ? [] : [...this.calls.values()].filter((call) => call.isComplete);
  }

  /** The answer as the API takes it. */
  get message() {
    const message = { role: "assistant", content: this.content };
    if (this.thinking !== null) message.reasoning = this.thinking.value;
    if (this.openCalls.length) message.tool_calls = this.openCalls.map((call) => call.message);
    return message;
  }

  async run(makeBody, signal, onGrowth) {
    const times = { sent: performance.now(), first: null, last: null };
    let usage = null;
    let end = "";
    try {
      const response = await request("v1/chat/completions", {
        method: "POST",
        headers: { "Content-Type": "application/json" },
        body: JSON.stringify(makeBody()),
        signal,
      });
      this.id = response.headers.get("X-Request-Id");
      for await (const { data } of events(response)) {
        if (data === "[DONE]") break;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new Error(chunk.error.message);
        usage = chunk.usage ?? usage;
        const choice = chunk.choices?.[0];
        if (this.add(choice?.delta ?? {})) {
          times.last = performance.now();
          times.first ??= times.last;
          text(this.status, tookText(times, null, ""));
          onGrowth();
        }
        end = choice?.finish_reason ?? end;
      }
    } catch (error) {
      this.wasStopped = true;
      if (signal.aborted) end = "stopped by you";
      else this.fail(error);
    }
    this.thinking?.end();
    text(this.status, tookText(times, usage?.completion_tokens ?? null, end));
  }

  /** Shows what is new, and returns whether anything is. Thinking comes under one of two names, or under both. */
  add({ content, reasoning, reasoning_content: otherReasoning, tool_calls: calls }) {
    const thinking = reasoning || otherReasoning;
    if (thinking) this.think(thinking);
    if (content) {
      this.thinking?.end();
      this.content += content;
      grow(this.text, content);
    }
    for (const call of calls ?? []) {
      this.thinking?.end();
      this.call(call.index ?? 0).add(call);
    }
    return Boolean(thinking || content || calls?.length);
  }

  think(piece) {
    if (this.thinking === null) {
      this.thinking = new Thinking();
      this.text.before(this.thinking.element);
    }
    this.thinking.add(piece);
  }

  /** The call with this index. */
  call(index) {
    if (!this.calls.has(index)) {
      const call = new Call();
      this.calls.set(index, call);
      this.error.before(call.element);
    }
    return this.calls.get(index);
  }

  fail(error) {
    this.error.hidden = false;
    text(this.error, error instanceof TypeError ? "The router does not answer." : error.message);
  }

  /** The router's own record of this answer, once it is complete. */
  async showPhases() {
    if (this.id === null) return;
    const id = `chatcmpl-${this.id}`;
    for (let tries = 0; tries < TRACE_TRIES; tries += 1) {
      try {
        const trace = await (await request(`v1/requests/${encodeURIComponent(id)}/trace`)).json();
        if (FINAL_STATES.has(trace.state)) {
          this.drawPhases(trace);
          return;
        }
      } catch {
        return; // The answer is there; only its record is gone.
      }
      await new Promise((resolve) => setTimeout(resolve, TRACE_PAUSE_MS));
    }
  }

  drawPhases(trace) {
    const now = trace.accepted_at + (trace.phases.finish ?? 0);
    const picture = strip();
    updateStrip(picture, trace, now);
    const link = h("a", { href: `#/requests/${encodeURIComponent(trace.request_id)}` }, "Details");
    this.phases.replaceChildren(picture, legend(trace, now), link);
    this.phases.hidden = false;
  }
}

/** TTFT 93 ms · TPOT 8.4 ms (119 tokens/s) · 64 tokens · stop */
function tookText({ sent, first, last }, tokens, end) {
  const parts = [];
  if (first !== null) {
    parts.push(`TTFT ${duration((first - sent) / 1000)}`);
    if (tokens > 1 && last > first) {
      const tpot = (last - first) / 1000 / (tokens - 1);
      parts.push(`TPOT ${duration(tpot)} (${(1 / tpot).toFixed(tpot < 0.1 ? 0 : 1)} tokens/s)`);
    }
  }
  if (tokens !== null) parts.push(`${count(tokens)} tokens`);
  if (end) parts.push(end);
  return parts.join(" · ") || "no answer";
}

function parsedTools(json) {
  try {
    return JSON.parse(json);
  } catch (error) {
    throw new Error(`The tools are not JSON: ${error.message}`);
  }
}

const number = (value, min, max, step) => h("input", { type: "number", value, min, max, step });

const field = (title, control) => h("label", { class: "field" }, h("span", {}, title), control);
