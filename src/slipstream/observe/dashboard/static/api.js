// Requests to the server that served this page, and its stream of changes.

import { BASE } from "./address.js";

const RETRY_MS = 3000;

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export function apiUrl(path, parameters = {}) {
  const url = new URL(`api/${path}`, BASE);
  for (const [name, value] of Object.entries(parameters))
    if (value !== null && value !== undefined && value !== "") url.searchParams.set(name, value);
  return url;
}

/** GET a JSON document. Without a session, the login page opens instead. */
export async function get(path, parameters = {}, signal = undefined) {
  let response;
  try {
    response = await fetch(apiUrl(path, parameters), { signal, headers: { accept: "application/json" } });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server does not answer. Is `slipstream dashboard`, or the gateway, still running?");
  }
  if (response.status === 401) {
    location.href = new URL("login", BASE);
    return new Promise(() => {}); // the page is on its way out
  }
  const body = await response.json().catch((error) => {
    if (error.name === "AbortError") throw error;
    return null;
  });
  if (!response.ok)
    throw new ApiError(response.status, body?.error?.message ?? `The server answered ${response.status}.`);
  if (body === null) throw new ApiError(response.status, "The server's answer is not JSON.");
  return body;
}

/**
 * Call `changed(states by run)` when something is recorded, and `connected(yes)` when the stream opens or breaks. A page that
 * is not visible has no stream, since a browser opens six connections to a server at most.
 */
export function listen(changed, connected) {
  let stream = null;
  let timer = 0;
  const close = () => {
    clearTimeout(timer);
    stream?.close();
  };
  const open = () => {
    close();
    if (document.hidden) return;
    stream = new EventSource(apiUrl("live"));
    stream.addEventListener("open", () => connected(true));
    stream.addEventListener("change", (event) => changed(JSON.parse(event.data).runs ?? {}));
    stream.addEventListener("error", ({ target }) => {
      connected(false);
      if (target.readyState === EventSource.CLOSED) timer = setTimeout(retry, RETRY_MS);
    });
  };
  // The browser tries again by itself when the connection breaks, but not when the server answers with an error.
  const retry = () =>
    get("runs")
      .catch(() => null)
      .then(open);
  document.addEventListener("visibilitychange", () => (document.hidden ? close() : open()));
  window.addEventListener("pagehide", close);
  window.addEventListener("pageshow", ({ persisted }) => persisted && open());
  open();
}

/** A loader that keeps one request under way: `load(path, parameters)` cancels what it asked for before. */
export function latest() {
  let controller = null;
  return async (path, parameters) => {
    controller?.abort();
    const own = (controller = new AbortController());
    return get(path, parameters, own.signal);
  };
}
