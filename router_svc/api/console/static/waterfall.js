// Pictures of a request's time: a strip of phases for lists, and a waterfall with an axis.

import { h, reconcile, text } from "./dom.js";
import { duration } from "./format.js";
import { PHASES, segmentsOf } from "./phases.js";

/** A strip for `updateStrip`. */
export const strip = () => h("div", { class: "strip", role: "img" });

/** Draws the phases of a record as consecutive segments over the whole width. */
export function updateStrip(element, record, now) {
  const segments = segmentsOf(record, now);
  const total = segments.at(-1)?.end || 1;
  reconcile(
    element,
    segments,
    // Two attempts can begin at the same time.
    (segment) => `${segments.indexOf(segment)} ${segment.phase}`,
    (segment) => h("i", { "data-phase": segment.phase }),
    (item, segment) => {
      item.style.flexGrow = String(Math.max((segment.end - segment.start) / total, 0.001));
      item.classList.toggle("open", segment.open);
    },
  );
  const label = segments.map((segment) => `${segment.phase} ${duration(segment.end - segment.start)}`).join(", ");
  element.setAttribute("aria-label", label || "no phase yet");
  element.title = label;
}

/** What the colours mean; with durations when a record is given. */
export function legend(record = null, now = 0) {
  const segments = record ? segmentsOf(record, now) : null;
  const phases = segments ? segments.map((segment) => segment.phase) : PHASES;
  const items = phases.map((phase, index) =>
    h(
      "li",
      {},
      h("i", { "data-phase": phase, "aria-hidden": "true" }),
      h("span", {}, phase),
      segments ? h("b", {}, duration(segments[index].end - segments[index].start)) : null,
    ),
  );
  return h("ul", { class: "legend", "aria-label": "Phases" }, items);
}

/** A waterfall for `updateWaterfall`. */
export const waterfall = () =>
  h("div", { class: "waterfall" }, h("div", { class: "axis", "aria-hidden": "true" }), h("ol", { class: "bars" }));

/** Draws steps { name, phase, where, start, end } on a common axis, with `ticks` [{ at, title }] on the prefill bar. */
export function updateWaterfall(element, steps, ticks) {
  const total = Math.max(...steps.map((step) => step.end), 1e-6);
  const [axis, list] = element.children;
  drawAxis(axis, total);
  reconcile(
    list,
    steps,
    (step) => step.name,
    (step) =>
      h(
        "li",
        {},
        h("span", { class: "step" }, step.name, h("small", {})),
        h("span", { class: "took" }),
        h("div", { class: "track", "aria-hidden": "true" }, bar(step.phase)),
      ),
    (row, step) => {
      const [name, took, track] = row.children;
      text(name.lastElementChild, step.where);
      text(took, duration(step.end - step.start));
      const item = track.firstElementChild;
      item.style.left = `${(100 * step.start) / total}%`;
      item.style.width = `${(100 * (step.end - step.start)) / total}%`;
      if (step.phase === "prefill") drawTicks(track, ticks, total);
    },
  );
}

function drawTicks(track, ticks, total) {
  reconcile(
    track,
    [BAR, ...ticks],
    (tick) => (tick === BAR ? BAR : tick.at),
    (tick) => h("b", { class: "tick", title: tick.title }),
    (item, tick) => {
      if (tick !== BAR) item.style.left = `${(100 * tick.at) / total}%`;
    },
  );
}

/** Key of the bar itself in its track, among ticks. */
const BAR = "bar";

function bar(phase) {
  const item = h("i", { "data-phase": phase });
  item.itemKey = BAR;
  return item;
}

function drawAxis(axis, total) {
  const rough = total / 5;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= rough);
  const marks = [];
  for (let index = 0; index * step < total * 0.93; index += 1) marks.push(index * step);
  reconcile(
    axis,
    marks,
    (at) => at,
    () => h("span"),
    (mark, at) => {
      text(mark, at === 0 ? "0" : axisLabel(at));
      mark.style.left = `${(100 * at) / total}%`;
    },
  );
}

const axisLabel = (at) => (at < 1 ? `${Number((at * 1000).toPrecision(3))} ms` : `${Number(at.toPrecision(3))} s`);
