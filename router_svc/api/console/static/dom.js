// Building and updating elements. Text goes into text nodes only: nothing here, or anywhere else, parses markup.

const SVG = "http://www.w3.org/2000/svg";

/** An element with attributes and children (nodes or text). `on` has listeners; a true attribute is empty. */
export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** Like `h`, for SVG. */
export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, { on = {}, ...attributes }, children) {
  for (const [name, value] of Object.entries(attributes)) attribute(element, name, value);
  for (const [type, listener] of Object.entries(on)) element.addEventListener(type, listener);
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

/** Sets an attribute if it differs; null and false remove it. */
export function attribute(element, name, value) {
  if (value === null || value === undefined || value === false) element.removeAttribute(name);
  else {
    const text = value === true ? "" : String(value);
    if (element.getAttribute(name) !== text) element.setAttribute(name, text);
  }
}

/** Sets the text if it differs, so that selections and screen readers are left alone. */
export function text(element, value) {
  const wanted = String(value);
  if (element.textContent !== wanted) element.textContent = wanted;
}

/** Adds a piece to a text that grows. */
export function grow(element, piece) {
  element.append(piece);
  // Many small text nodes are slow to lay out.
  if (element.childNodes.length > 64) element.normalize();
}

/** Makes the children of `parent` those of `items`, in order, keeping the element of each key (and its focus). */
export function reconcile(parent, items, keyOf, create, update) {
  const known = new Map();
  for (const child of parent.children) known.set(child.itemKey, child);
  let cursor = parent.firstElementChild;
  for (const item of items) {
    const key = keyOf(item);
    let element = known.get(key);
    if (element === undefined) {
      element = create(item);
      element.itemKey = key;
    }
    known.delete(key);
    update(element, item);
    if (element === cursor) cursor = cursor.nextElementSibling;
    else parent.insertBefore(element, cursor);
  }
  for (const left of known.values()) left.remove();
}

/** Moves focus among the elements of a list with the arrow keys; one of them is in the tab order. */
export function roving(container, selector) {
  const all = () => [...container.querySelectorAll(selector)];
  const steps = { ArrowDown: 1, ArrowUp: -1 };
  container.addEventListener("keydown", (event) => {
    const items = all();
    const at = items.indexOf(document.activeElement);
    if (at < 0 || event.altKey || event.ctrlKey || event.metaKey) return;
    const target =
      event.key in steps ? items[at + steps[event.key]]
      : event.key === "Home" ? items[0]
      : event.key === "End" ? items.at(-1)
      : null;
    if (!target) return;
    event.preventDefault();
    for (const item of items) item.tabIndex = item === target ? 0 : -1;
    target.focus();
  });
  return () => {
    const items = all();
    const current = items.find((item) => item === document.activeElement) ?? items.find((item) => item.tabIndex === 0) ?? items[0];
    for (const item of items) item.tabIndex = item === current ? 0 : -1;
  };
}
