// Reading from the router: errors with the API's own message, and server-sent events.

/** What the API answered instead of a success. */
export class ApiError extends Error {
  constructor(status, message, retryAfterS) {
    super(message);
    this.status = status;
    this.retryAfterS = retryAfterS;
  }
}

/** What a header can carry as a key. */
const SENDABLE = /^[\x20-\x7e]*$/;

let apiKey = "";

/** The key for further requests. It stays in this page's memory. */
export function useApiKey(key) {
  apiKey = key.trim();
}

/** Whether requests have a key. */
export const hasApiKey = () => apiKey !== "";

/** Whether an answer asks for a key, or for another one. */
export const asksForKey = (status) => status === 401 || status === 403;

/** Fetches a path below the router's root. Throws `ApiError` for any status that is not a success. */
export async function request(path, options = {}) {
  // `fetch` would fail as if the router did not answer.
  if (!SENDABLE.test(apiKey)) throw new ApiError(401, "The API key has characters that keys do not have. Enter it again.");
  const headers = { ...options.headers };
  if (apiKey) headers.Authorization = `Bearer ${apiKey}`;
  const response = await fetch(new URL(`../${path}`, import.meta.url), { cache: "no-store", ...options, headers });
  if (response.ok) return response;
  const retryAfterS = Number(response.headers.get("Retry-After")) || null;
  let message = `The router answered ${response.status} ${response.statusText}.`;
  try {
    message = String((await response.json()).error.message);
  } catch {
    // Not an answer of our API, perhaps a proxy's.
  }
  throw new ApiError(response.status, message, retryAfterS);
}

/** The events of a response, as { event, data }. Ends with the response. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      rest += value;
      let end;
      while ((end = rest.indexOf("\n\n")) >= 0) {
        const event = parse(rest.slice(0, end));
        rest = rest.slice(end + 2);
        if (event.data) yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function parse(block) {
  const event = { event: "message", data: "" };
  for (const line of block.split("\n")) {
    const [, field, value] = /^(\w*): ?(.*)$/.exec(line) ?? [];
    if (field === "event") event.event = value;
    else if (field === "data") event.data += event.data ? `\n${value}` : value;
  }
  return event;
}
