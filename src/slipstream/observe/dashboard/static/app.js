// The frame around the pages: navigation, choice of runs, live state and theme.

import * as address from "./address.js";
import { get, listen } from "./api.js";
import { debounce, h, icon, render, update } from "./dom.js";
import { ago, integer, now, setNow } from "./format.js";
import * as fleet from "./pages/fleet.js";
import * as mismatch from "./pages/mismatch.js";
import * as rollouts from "./pages/rollouts.js";
import * as run from "./pages/run.js";
import * as timeline from "./pages/timeline.js";

const PAGES = { run, rollouts, fleet, timeline, mismatch };
const SILENT_SECONDS = 60; // a live run that records nothing for so long is reported as silent

const main = document.getElementById("main");
const side = document.getElementById("side");
const status = h("span.pill");
const picker = h("details.menu");
let runs = []; // of the server
let chosen = []; // those shown: the first is the run, the others are compared with it
let view = null;
let isConnected = null; // not known before the stream opens
let shows = 0; // counts calls of `show`, of which the last one wins
let isBusy = false; // a page is being opened or refreshed
let isOutdated = false; // something changed meanwhile
let isListOld = false; // a run has appeared that is not in `runs`

/** Open what the address names. */
async function show() {
  const turn = ++shows;
  isBusy = true;
  isListOld = false;
  closeView();
  const name = address.page() in PAGES ? address.page() : "run";
  document.title = `${PAGES[name].title} · Slipstream`;
  showTabs(name);
  main.setAttribute("aria-busy", "true");
  try {
    const listed = (await get("runs")).runs;
    if (turn !== shows) return;
    runs = listed;
    setNow(runs[0]?.now);
    const first = runs.find((entry) => entry.id === address.get("run")) ?? newest();
    const others = address
      .get("with")
      .split(",")
      .map((id) => runs.find((entry) => entry.id === id && id !== first?.id));
    chosen = first ? [first, ...others.filter(Boolean)] : [];
    showPicker();
    showStatus();
    if (!first) return showNoRuns();
    const detail = await get(`runs/${first.id}`);
    if (turn !== shows) return;
    Object.assign(first, detail); // the page sees what `changed` adds to it
    const root = h("div.page");
    render(main, h("h1.sr", {}, `${PAGES[name].title}: ${first.name}`), stopped(first), root);
    const mounted = await PAGES[name].mount(root, { run: first, runs: chosen });
    if (turn === shows) view = mounted;
    else mounted.destroy?.();
  } catch (error) {
    if (turn === shows && error.name !== "AbortError") showError(error);
  } finally {
    if (turn === shows) {
      main.removeAttribute("aria-busy");
      done();
    }
  }
}

/** A page was opened or refreshed; what changed meanwhile is asked for now. */
function done() {
  isBusy = false;
  if (isOutdated) refresh();
  isOutdated = false;
}

function closeView() {
  view?.destroy?.();
  view = null;
}

function newest() {
  return [...runs].sort(
    (a, b) =>
      (a.state === "unreadable") - (b.state === "unreadable") ||
      (b.state === "live") - (a.state === "live") ||
      (b.started ?? 0) - (a.started ?? 0),
  )[0];
}

function showTabs(current) {
  const links = Object.entries(PAGES).map(([name, { title }]) =>
    h("a", { href: address.href(name), "aria-current": name === current && "page" }, title),
  );
  render(document.getElementById("tabs"), links);
  document.getElementById("brand").href = address.href("run");
}

function showNoRuns() {
  render(
    main,
    h(
      "div.panel.empty",
      {},
      h("h2", {}, "No run yet"),
      h(
        "p",
        {},
        "Start one with ",
        h("code", {}, "slipstream demo"),
        " or ",
        h("code", {}, "slipstream train"),
        ", or pass other run directories to ",
        h("code", {}, "slipstream dashboard"),
        ". It appears here by itself.",
      ),
    ),
  );
}

function showError(error) {
  if (!error.status) console.debug(error);
  closeView();
  render(
    main,
    h(
      "div.panel.empty",
      { role: "alert" },
      h("h2", {}, "This page could not be loaded"),
      h("p", {}, error.message),
      h("button.primary", { onclick: show }, "Try again"),
    ),
  );
}

function stopped({ stopped: reason }) {
  return reason && h("p.notice.warn", { role: "status" }, h("b", {}, "Not recorded any more:"), ` ${reason}`);
}

function showStatus() {
  const first = chosen[0];
  const silent = first ? now() - first.updated : 0;
  const [kind, text] =
    isConnected === false
      ? ["bad", "Connection lost, retrying"]
      : !first
        ? ["", "Waiting for a run"]
        : first.state === "live"
          ? silent > SILENT_SECONDS
            ? ["warn", `Silent, last record ${ago(first.updated)}`]
            : ["good live", `Live · ${ago(first.updated)}`]
          : first.state === "dead"
            ? ["bad", `Ended without finishing · ${ago(first.updated)}`]
            : first.state === "unreadable"
              ? ["bad", ["This record cannot be read", first.stopped].filter(Boolean).join(": ")]
              : first.state === "empty"
                ? ["", "Nothing recorded yet"]
                : ["", `Finished · ${ago(first.ended ?? first.updated)}`];
  status.className = `pill ${kind}`;
  status.title = text;
  render(status, text);
}

function showPicker() {
  const [first] = chosen;
  const rows = runs.map((entry) => {
    const isFirst = entry.id === first?.id;
    const compared = chosen.some(({ id }) => id === entry.id);
    const others = chosen.slice(1).map(({ id }) => id);
    const compare = () =>
      address.open(address.page(), {
        ...Object.fromEntries(new URLSearchParams(location.search)),
        with: (compared ? others.filter((id) => id !== entry.id) : [...others, entry.id]).join(","),
      });
    return h(
      "div.run-row",
      {},
      h("input", {
        type: "checkbox",
        checked: compared,
        disabled: isFirst,
        onchange: compare,
        "aria-label": `Compare ${entry.name}`,
      }),
      h(
        "a.name",
        {
          href: address.href(address.page(), { run: entry.id }),
          onclick: () => (picker.open = false),
          "aria-current": isFirst && "true",
        },
        entry.name,
      ),
      h("span.muted", {}, entry.state),
      h(
        "small",
        {},
        [entry.config?.task, entry.config?.algorithm, entry.config?.mode].filter(Boolean).join(" · "),
        ` · ${integer(entry.steps)} steps`,
      ),
    );
  });
  const more = chosen.length > 1 ? ` + ${chosen.length - 1}` : "";
  update(
    picker,
    h(
      "summary",
      { title: "Choose and compare runs" },
      h("span.sr", {}, "Runs: "),
      h("span.ellipsis", {}, `${first?.name ?? "No run"}${more}`),
      icon("M4 6l4 4 4-4"),
    ),
    h(
      "div",
      {},
      rows.length ? rows : h("p.muted", {}, "No run yet"),
      h("form.logout", { method: "post", action: "logout" }, h("button.plain", {}, "Log out")),
    ),
  );
}

function themeButton() {
  const toggle = () => window.setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
  return h(
    "button.plain",
    { onclick: toggle, "aria-label": "Switch between light and dark", title: "Light or dark (t)", id: "theme" },
    icon("M8 2a6 6 0 1 0 0 12zM8 2a6 6 0 0 1 0 12"),
  );
}

const refresh = debounce(async () => {
  showStatus();
  isOutdated = isBusy;
  if (isBusy) return;
  if (!view || isListOld) return show();
  const turn = shows;
  isBusy = true;
  try {
    await view.refresh?.(chosen);
  } catch (error) {
    if (turn === shows && error.name !== "AbortError") showError(error);
  } finally {
    if (turn === shows) done();
  }
}, 100);

/** The stream says which runs changed; a page asks for what it shows. */
function changed(states) {
  let touched = false;
  for (const [id, state] of Object.entries(states)) {
    const entry = runs.find((known) => known.id === id);
    isListOld ||= !entry;
    if (!entry) continue;
    const differs = Object.entries(state).some(
      ([name, value]) => name !== "now" && name in entry && entry[name] !== value,
    );
    setNow(state.now);
    Object.assign(entry, state);
    touched ||= differs && chosen.includes(entry);
  }
  if (touched || isListOld || !chosen.length) refresh();
}

function connected(yes) {
  if (yes && isConnected !== null) refresh(); // the stream was closed for a while
  isConnected = yes;
  showStatus();
}

// One key, without modifiers and outside of fields: 1 to 5 open the pages, t switches the theme, ? explains.
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea")) return;
  const name = Object.keys(PAGES)[Number(event.key) - 1];
  if (name) address.open(name);
  else if (event.key === "t") document.getElementById("theme").click();
});
document.addEventListener("click", (event) => {
  if (picker.open && !picker.contains(event.target)) picker.open = false;
});
picker.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  picker.open = false;
  picker.querySelector("summary").focus();
});
document.addEventListener("themechange", () => view?.redraw?.());

address.onNavigation(show);
address.followLinks();
side.append(status, picker, themeButton());
await show();
listen(changed, connected);
setInterval(showStatus, 5000);
