// The page: which view is shown, the header with what is wrong, and drawing at each change.

import { clusterView } from "./cluster.js";
import { attribute, h, reconcile, text } from "./dom.js";
import { Feed } from "./feed.js";
import { figures } from "./figures.js";
import { duration, modelsOf } from "./format.js";
import { FINAL_STATES } from "./phases.js";
import { playgroundView } from "./playground.js";
import { RequestList, listHead, newest, requestsPane } from "./requests.js";
import { asksForKey, hasApiKey, useApiKey } from "./sse.js";
import { TracePane } from "./trace.js";

const VIEWS = { cluster: "Cluster", requests: "Requests", playground: "Playground" };
const LATEST = 8;
/** States older than this are marked as such. */
const STALE_S = 4;

const element = (id) => document.getElementById(id);

const feed = new Feed();
const drawFigures = figures(element("figures"));
const latest = new RequestList({ limit: LATEST, label: "Latest requests" });
const latestEmpty = h("p", { class: "empty" }, "No request yet. Send one, or try the playground.");
const drawCluster = clusterView(
  element("view-cluster"),
  h(
    "section",
    { class: "card", "aria-labelledby": "latest-requests" },
    h("header", {}, h("h2", { id: "latest-requests" }, "Latest requests"), h("a", { href: "#/requests", class: "more" }, "All requests")),
    listHead(),
    latest.element,
    latestEmpty,
  ),
);
const pane = requestsPane();
const trace = new TracePane();
element("view-requests").append(h("div", { class: "split" }, pane.element, trace.element));
const drawPlayground = playgroundView(element("view-playground"));

let view = "cluster";
let selected = null;

/** Takes the view and the request from the address: #/requests/ID. */
function route() {
  const [, name, id] = /^#\/(\w+)(?:\/(.+))?$/.exec(location.hash) ?? [];
  if (location.hash && !location.hash.startsWith("#/")) return; // the skip link
  view = name in VIEWS ? name : "cluster";
  selected = view === "requests" && id ? decoded(id) : null;
  for (const link of document.querySelectorAll("nav a")) attribute(link, "aria-current", link.dataset.view === view ? "page" : null);
  for (const other of Object.keys(VIEWS)) element(`view-${other}`).hidden = other !== view;
  document.body.dataset.view = view;
  document.body.classList.toggle("has-selection", selected !== null);
  document.title = `${VIEWS[view]} · pdserve`;
  trace.open(selected);
  draw();
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

function draw() {
  drawConnection();
  const { state, history } = feed;
  if (!state) return;
  const now = feed.now();
  const requests = newest(state);
  text(element("model"), modelsOf(state).join(", "));
  text(element("version"), `pdserve ${state.router.version}`);
  element("figures").hidden = view === "playground";
  if (view !== "playground") drawFigures(state, history, requests);
  if (view === "cluster") {
    drawCluster(state);
    latest.show(requests, now);
    latestEmpty.hidden = requests.length > 0;
  } else if (view === "requests") {
    pane.show(state, now, selected);
    trace.follow(selected === null ? null : state.requests[selected], now);
  }
  drawPlayground(state);
}

// Health and problems

const LEVELS = {
  ok: "Serving",
  warn: "Degraded",
  bad: "Not serving",
  lost: "No connection",
  unknown: "Connecting",
};

function drawConnection() {
  const problems = [...connectionProblems(), ...(feed.state?.problems ?? [])];
  const level = levelOf();
  attribute(element("health"), "data-level", level);
  const isRefused = level === "lost" && asksForKey(feed.connection.status);
  text(element("health").lastElementChild, isRefused ? "No access" : LEVELS[level]);
  const age = feed.ageS();
  const isStale = feed.connection.kind !== "live" || age > STALE_S;
  document.body.classList.toggle("stale", feed.state !== null && isStale);
  text(element("age"), age === null ? "" : isStale ? `as of ${duration(Math.floor(age))} ago` : "live");
  const hadFocus = element("problems").contains(document.activeElement);
  reconcile(element("problems"), problems, (problem) => problem.key ?? problem.title, makeProblem, updateProblem);
  // What was used is gone with its problem: the keyboard goes on where the content is.
  if (hadFocus && document.activeElement === document.body) element("main").focus();
}

function levelOf() {
  const { connection, state } = feed;
  if (connection.kind === "lost") return "lost";
  if (!state) return "unknown";
  if (state.router.status !== "ready") return "bad";
  return state.problems.length ? "warn" : "ok";
}

function connectionProblems() {
  const { connection } = feed;
  if (connection.kind !== "lost") return [];
  if (asksForKey(connection.status)) return [keyProblem(connection)];
  const waitS = Math.max(0, Math.ceil((connection.retryAt - performance.now()) / 1000));
  const next = `The next try is in ${waitS} s.`;
  const title = connection.message ? "The router refuses this console" : "The router does not answer";
  const old = feed.state ? "What you see is old." : "Check its address, and that it runs.";
  return [{ severity: "critical", title, text: `${connection.message ?? old} ${next}`, retries: true }];
}

function keyProblem({ status, message }) {
  const problem = { key: "api-key", severity: "critical", asksKey: true, text: message };
  if (status === 403) return { ...problem, title: "This API key does not open the console" };
  if (hasApiKey()) return { ...problem, title: "The API key was refused" };
  const ask = "Enter the key of an admin. This page keeps it until it is closed or loaded again.";
  return { ...problem, title: "This router asks for an API key", text: ask };
}

function makeProblem(problem) {
  const retry = problem.retries ? h("button", { type: "button", on: { click: () => feed.connect() } }, "Try now") : null;
  const form = problem.asksKey ? keyForm() : null;
  return h("div", { class: "problem" }, h("b", { class: "title" }), h("span", { class: "text" }), retry, form);
}

function updateProblem(row, problem) {
  attribute(row, "data-severity", problem.severity);
  const [title, detail] = row.children;
  text(title, problem.title);
  text(detail, problem.text);
}

function keyForm() {
  const input = h("input", { type: "password", autocomplete: "off" });
  const onSubmit = (event) => {
    event.preventDefault();
    useApiKey(input.value);
    feed.connect();
    trace.open(selected); // A request that was refused before.
  };
  return h("form", { class: "key", on: { submit: onSubmit } }, h("label", {}, h("span", {}, "API key"), input), h("button", { type: "submit" }, "Use"));
}

let isDue = false;

function drawSoon() {
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(() => {
    isDue = false;
    draw();
  });
}

feed.addEventListener("change", drawSoon);
addEventListener("hashchange", route);
// Running requests grow, and waits count down, between two states.
setInterval(() => {
  const isMoving = feed.state && Object.values(feed.state.requests).some((request) => !FINAL_STATES.has(request.state));
  if (feed.connection.kind !== "live" || feed.ageS() > STALE_S || isMoving) drawSoon();
}, 500);
route();
feed.connect();
