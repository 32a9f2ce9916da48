// What is shown is in the address: page, runs, filters and zoom. A link opens the same view.

export const BASE = new URL("./", location.href);

let listener = () => {};

/** Call `run` when another page or run is opened, also by the browser's back button. */
export function onNavigation(run) {
  listener = run;
  window.addEventListener("popstate", run);
}

export function page() {
  return location.pathname.slice(BASE.pathname.length) || "run";
}

export function get(name) {
  return new URLSearchParams(location.search).get(name) ?? "";
}

export function number(name) {
  const value = get(name);
  return value === "" || !Number.isFinite(Number(value)) ? null : Number(value);
}

/** Change parameters of the address without a new entry in the browser's history; null and "" remove one. */
export function change(changes) {
  history.replaceState(
    null,
    "",
    href(page(), { ...Object.fromEntries(new URLSearchParams(location.search)), ...changes }),
  );
}

/** The address of a page. The chosen runs stay unless `parameters` names others. */
export function href(name, parameters = {}) {
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries({ run: get("run"), with: get("with"), ...parameters }))
    if (value !== null && value !== undefined && value !== "" && value !== false) query.set(key, value);
  const text = query.toString().replaceAll("%2C", ",");
  return `${BASE.pathname}${name}${text && `?${text}`}`;
}

export function open(name, parameters = {}) {
  history.pushState(null, "", href(name, parameters));
  listener();
}

/** Links to our own pages change the view without loading it anew. */
export function followLinks() {
  document.addEventListener("click", (event) => {
    const link = event.target.closest?.("a[href]");
    if (!link || event.defaultPrevented || event.button || event.metaKey || event.ctrlKey || event.shiftKey) return;
    const target = new URL(link.href);
    if (target.origin !== location.origin || link.hasAttribute("download") || link.target) return;
    if (!target.pathname.startsWith(BASE.pathname) || target.hash) return;
    event.preventDefault();
    history.pushState(null, "", target);
    listener();
  });
}
