// Shows the OpenAPI document: contents, one section for each operation, one for each schema.

import { h } from "./dom.js";

const JSON_MEDIA = "application/json";
const METHODS = ["get", "post", "put", "patch", "delete"];
const $ = (id) => document.getElementById(id);

/** The members of a document that the page needs, resolved by name. */
function resolver(api) {
  return (value) => (value?.$ref ? value.$ref.split("/").slice(1).reduce((at, name) => at[name], api) : value);
}

const nameOf = (ref) => ref.split("/").at(-1);
const anchor = (...words) => words.join("-").replace(/[^A-Za-z0-9.-]+/g, "_");

/** Texts of the document have `code`, **strong** and paragraphs, and nothing else. */
function inline(text) {
  return text.split(/(`[^`]+`|\*\*[^*]+\*\*)/).map((piece) =>
    piece.startsWith("`") ? h("code", {}, piece.slice(1, -1))
    : piece.startsWith("**") ? h("strong", {}, piece.slice(2, -2))
    : piece,
  );
}

const paragraphs = (text) => text.trim().split("\n\n").map((each) => h("p", {}, inline(each)));

/** Types and bounds of a schema in a few words; schemas with a name are links. */
function kind(schema) {
  if (schema.$ref) return [h("a", { href: `#${anchor("schema", nameOf(schema.$ref))}` }, nameOf(schema.$ref))];
  const options = schema.anyOf ?? schema.oneOf;
  if (options) return joined(options.map(kind), " or ");
  if ("const" in schema) return [JSON.stringify(schema.const)];
  if (schema.enum) return [schema.enum.map((value) => JSON.stringify(value)).join(" or ")];
  if (schema.type === "array") return ["list of ", ...kind(schema.items ?? {}), ...bounds(schema)];
  if (schema.type === "object" && typeof schema.additionalProperties === "object")
    return ["map to ", ...kind(schema.additionalProperties), ...bounds(schema)];
  const type = Array.isArray(schema.type) ? schema.type.join(" or ") : schema.type ?? "any";
  return [type, ...bounds(schema)];
}

function joined(lists, separator) {
  return lists.flatMap((list, index) => (index ? [separator, ...list] : list));
}

function bounds(schema) {
  const found = [];
  const range = (low, high, unit) => {
    if (low !== undefined && high !== undefined) found.push(`${low} to ${high}${unit}`);
    else if (low !== undefined) found.push(`at least ${low}${unit}`);
    else if (high !== undefined) found.push(`at most ${high}${unit}`);
  };
  if (schema.exclusiveMinimum !== undefined) found.push(`above ${schema.exclusiveMinimum}`);
  range(schema.minimum, schema.maximum, "");
  range(schema.minLength, schema.maxLength, " characters");
  range(schema.minItems, schema.maxItems, " entries");
  range(schema.minProperties, schema.maxProperties, " entries");
  if (schema.pattern) found.push(schema.pattern);
  if (schema.propertyNames?.pattern) found.push(`names ${schema.propertyNames.pattern}`);
  if (schema.default !== undefined) found.push(`default ${JSON.stringify(schema.default)}`);
  return found.length ? [` (${found.join(", ")})`] : [];
}

function fieldRow(name, schema, required) {
  return h("div", {},
    h("dt", {}, name, required ? h("span", { class: "required" }, " required") : null),
    h("dd", {}, h("span", { class: "kind" }, ...kind(schema)), ...(schema.description ? paragraphs(schema.description) : [])));
}

/** Required fields come first. Those without effect come last, and closed: nobody looks for them first. */
function fields(schema) {
  const isRequired = (name) => schema.required?.includes(name) ?? false;
  const isIdle = (name) => /^(Accepted without effect|Not supported)/.test(schema.properties[name].description ?? "");
  const rows = (names) => h("dl", { class: "fields" }, names.map((name) => fieldRow(name, schema.properties[name], isRequired(name))));
  const names = Object.keys(schema.properties ?? {}).sort((a, b) => isRequired(b) - isRequired(a));
  const idle = names.filter(isIdle);
  const used = names.filter((name) => !isIdle(name));
  return [
    used.length ? rows(used) : null,
    idle.length ? h("details", {}, h("summary", {}, `${idle.length} fields that are not supported or have no effect`), rows(idle)) : null,
    schema.additionalProperties === false ? h("p", { class: "note" }, "Any other field is refused.") : null,
  ];
}

function operationSection(api, path, method, operation) {
  const resolve = resolver(api);
  const id = anchor(method, path);
  const parameters = (operation.parameters ?? []).map(resolve);
  // A body has one media type: JSON, which needs no word, or a form.
  const [[media, { schema: body }]] = Object.entries(operation.requestBody?.content ?? { [JSON_MEDIA]: {} });
  const statuses = Object.entries(operation.responses).map(([status, response]) => [status, resolve(response)]);
  const isGood = ([status]) => Number(status) < 400;
  return h("section", { class: "card", id, "aria-labelledby": `${id}-title` },
    h("h2", { id: `${id}-title` },
      h("span", { class: "method", "data-method": method }, method.toUpperCase()), h("span", { class: "path" }, path)),
    h("p", {}, ...inline(operation.summary), "."),
    operation.description ? paragraphs(operation.description) : null,
    operation.security?.length === 0 ? h("p", { class: "note" }, "Needs no key.") : null,
    parameters.length ? h("h3", {}, "Parameters") : null,
    parameters.length ? h("dl", { class: "fields" }, parameters.map((each) =>
      fieldRow(`${each.name} (${each.in})`, { ...each.schema, description: each.description }, each.required))) : null,
    body ? h("h3", {}, "Body: ", media === JSON_MEDIA ? [] : `${media}: `, ...kind(body)) : null,
    body ? fields(resolve(body)) : null,
    h("h3", {}, "Answers"),
    h("dl", { class: "fields" }, statuses.filter(isGood).map(([status, each]) => answerRow(status, each))),
    statuses.every(isGood) ? null : h("details", {},
      h("summary", {}, "Errors: ", statuses.filter((each) => !isGood(each)).map(([status]) => status).join(", ")),
      h("dl", { class: "fields" }, statuses.filter((each) => !isGood(each)).map(([status, each]) => answerRow(status, each)))));
}

function answerRow(status, response) {
  const contents = Object.entries(response.content ?? {}).map(([media, content]) =>
    h("p", { class: "kind" }, `${media}: `, ...kind(content.schema ?? {})));
  const headers = Object.keys(response.headers ?? {});
  return h("div", {}, h("dt", {}, status), h("dd", {},
    ...inline(response.description), contents,
    headers.length ? h("p", { class: "note" }, `Headers: ${headers.join(", ")}`) : null));
}

function schemaSection(name, schema) {
  const id = anchor("schema", name);
  return h("section", { class: "card", id, "aria-labelledby": `${id}-title` },
    h("h2", { id: `${id}-title` }, name),
    schema.description ? paragraphs(schema.description) : null,
    schema.properties ? fields(schema) : h("p", { class: "kind" }, ...kind(schema)));
}

function contents(groups, schemas) {
  const list = (links) => h("ul", {}, links.map(([href, label]) => h("li", {}, h("a", { href }, label))));
  return [
    ...groups.flatMap(({ name, operations }) => [
      h("h2", {}, name),
      list(operations.map(({ path, method }) => [`#${anchor(method, path)}`, `${method.toUpperCase()} ${path}`])),
    ]),
    h("h2", {}, "Schemas"),
    list(schemas.map((name) => [`#${anchor("schema", name)}`, name])),
  ];
}

function show(api) {
  const operations = Object.entries(api.paths).flatMap(([path, item]) =>
    METHODS.filter((method) => item[method]).map((method) => ({ path, method, operation: item[method] })));
  const groups = api.tags
    .map(({ name, description }) => ({ name, description, operations: operations.filter((each) => each.operation.tags.includes(name)) }))
    .filter((group) => group.operations.length);
  const schemas = Object.keys(api.components.schemas);
  $("contents").append(...contents(groups, schemas));
  $("sections").append(
    h("section", { class: "card about", "aria-label": "About" }, paragraphs(api.info.description)),
    ...groups.flatMap((group) => group.operations.map(({ path, method, operation }) => operationSection(api, path, method, operation))),
    ...schemas.map((name) => schemaSection(name, api.components.schemas[name])));
  $("console").hidden = !("/console/" in api.paths);
  $("state").hidden = true;
  $("reference").hidden = false;
  // The address may name a section that did not exist before.
  if (location.hash.length > 1) $(decodeURIComponent(location.hash.slice(1)))?.scrollIntoView();
}

try {
  const response = await fetch("../openapi.json");
  if (!response.ok) throw new Error(`the router answered ${response.status}`);
  show(await response.json());
} catch (error) {
  $("state").textContent = `The document cannot be read: ${error.message}. Reload the page.`;
}
