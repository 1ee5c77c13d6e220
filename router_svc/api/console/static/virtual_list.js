// A table of any length of which only the visible rows exist.

import { attribute, h, reconcile } from "./dom.js";

const OVERSCAN = 6;

/**
 * Rows of equal height in a scrolling body. `row` has `create(item)` and `update(element, item)`; a row's first button
 * opens it and takes part in the arrow keys.
 */
export class VirtualList {
  constructor({ label, head, rowHeight, maxRows, keyOf, row }) {
    this.rowHeight = rowHeight;
    this.maxRows = maxRows;
    this.keyOf = keyOf;
    this.row = row;
    this.items = [];
    this.activeKey = null;
    this.before = h("div", { role: "presentation" });
    this.rows = h("div", { role: "rowgroup" });
    this.after = h("div", { role: "presentation" });
    this.body = h("div", { class: "vlist-body", role: "presentation" }, this.before, this.rows, this.after);
    this.element = h("div", { class: "vlist", role: "table", "aria-label": label }, head, this.body);
    this.body.addEventListener("scroll", () => this.draw(), { passive: true });
    this.body.addEventListener("keydown", (event) => this.onKey(event));
    this.body.addEventListener("focusin", (event) => {
      const row = event.target.closest("[role=row]");
      if (row) this.activeKey = row.itemKey;
    });
  }

  /** Shows these items. */
  show(items) {
    this.items = items;
    attribute(this.element, "aria-rowcount", items.length + 1);
    this.body.style.maxHeight = `${this.rowHeight * this.maxRows}px`;
    this.draw();
  }

  draw() {
    const { items, rowHeight } = this;
    const top = Math.floor(this.body.scrollTop / rowHeight);
    const first = Math.max(0, Math.min(top - OVERSCAN, items.length - this.maxRows - 2 * OVERSCAN));
    const last = Math.min(items.length, first + this.maxRows + 2 * OVERSCAN);
    this.first = first;
    this.before.style.height = `${first * rowHeight}px`;
    this.after.style.height = `${(items.length - last) * rowHeight}px`;
    const visible = items.slice(first, last);
    const isActiveShown = visible.some((item) => this.keyOf(item) === this.activeKey);
    let index = first;
    reconcile(this.rows, visible, this.keyOf, this.row.create, (element, item) => {
      this.row.update(element, item);
      attribute(element, "aria-rowindex", index + 2);
      const isStop = isActiveShown ? this.keyOf(item) === this.activeKey : index === first;
      element.querySelector("button").tabIndex = isStop ? 0 : -1;
      index += 1;
    });
    this.measure();
  }

  /** Rows are higher where fingers point. */
  measure() {
    const height = this.rows.firstElementChild?.offsetHeight;
    if (!height || height === this.rowHeight) return;
    this.rowHeight = height;
    this.show(this.items);
  }

  onKey(event) {
    const page = Math.max(1, this.maxRows - 1);
    const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity };
    if (!(event.key in steps) || event.altKey || event.ctrlKey || event.metaKey || !this.items.length) return;
    event.preventDefault();
    const at = this.items.findIndex((item) => this.keyOf(item) === this.activeKey);
    const target = Math.max(0, Math.min(this.items.length - 1, at + steps[event.key]));
    this.activeKey = this.keyOf(this.items[target]);
    const y = target * this.rowHeight;
    const height = this.body.clientHeight;
    if (y < this.body.scrollTop) this.body.scrollTop = y;
    else if (y + this.rowHeight > this.body.scrollTop + height) this.body.scrollTop = y + this.rowHeight - height;
    this.draw();
    for (const element of this.rows.children) {
      if (element.itemKey === this.activeKey) element.querySelector("button").focus({ preventScroll: true });
    }
  }
}
