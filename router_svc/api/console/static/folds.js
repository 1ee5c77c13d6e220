// What is folded away in an answer: its thinking, and the arguments of each call of a tool.

import { attribute, grow, h, text } from "./dom.js";
import { duration } from "./format.js";

/** A closed block with a title and a text that grows. */
class Fold {
  constructor(title) {
    this.value = "";
    this.title = h("summary", {}, title);
    this.body = h("div", { class: "body" });
    this.element = h("details", {}, this.title, this.body);
  }

  add(piece) {
    this.value += piece;
    grow(this.body, piece);
  }
}

/** All thinking of one answer. */
export class Thinking extends Fold {
  constructor() {
    super("Thinking");
    attribute(this.element, "class", "thinking");
    this.startedAt = performance.now();
    this.lastAt = this.startedAt;
  }

  add(piece) {
    super.add(piece);
    this.lastAt = performance.now();
  }

  /** The model has turned to something else. */
  end() {
    text(this.title, `Thought for ${duration((this.lastAt - this.startedAt) / 1000)}`);
  }
}

/** One call: its name as the title, its arguments, and a field for the result once the call is complete. */
export class Call {
  constructor() {
    this.id = "";
    this.name = "";
    this.fold = new Fold("");
    // Enter in it sends what the composer has.
    this.result = h("input", { form: "composer", autocomplete: "off", placeholder: "Empty" });
    this.field = h("label", { hidden: true }, h("span", {}, "Result"), this.result);
    this.element = h("div", { class: "call" }, this.fold.element, this.field);
  }

  add({ id, function: { name, arguments: piece } = {} }) {
    this.id = id ?? this.id;
    this.name += name ?? "";
    text(this.fold.title, `Call of ${this.name}`);
    if (piece) this.fold.add(piece);
  }

  /** Whether the arguments are an object. They are not where the answer was cut within them. */
  get isComplete() {
    try {
      const value = JSON.parse(this.fold.value);
      return value instanceof Object && !Array.isArray(value);
    } catch {
      return false;
    }
  }

  /** Takes a result until it is closed. */
  open() {
    text(this.field.firstChild, `Result of ${this.name}`);
    this.field.hidden = false;
  }

  close() {
    this.result.readOnly = true;
  }

  /** As a message of the assistant has it. */
  get message() {
    return { id: this.id, type: "function", function: { name: this.name, arguments: this.fold.value } };
  }

  /** The message with its result. */
  get answer() {
    return { role: "tool", tool_call_id: this.id, content: this.result.value };
  }
}
