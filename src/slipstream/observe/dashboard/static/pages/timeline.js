// What trainer, gateway and engines did, on one clock; a sync opens its report.

import * as address from "../address.js";
import { apiUrl, get, latest } from "../api.js";
import { announce, announceError, debounce, h, render, update } from "../dom.js";
import { clock, duration, integer, oneLine } from "../format.js";
import { Lanes } from "../lanes.js";
import { syncReport, syncTable } from "../sync_report.js";

export const title = "Timeline";

const SPANS = 4000;
const FIRST_STEPS = 5; // in view at first
const SYNC_NAMES = ["sync", "begin", "stage", "commit", "update"];
const LISTED = 100;

export async function mount(root, { run }) {
  const load = latest();
  const loadReport = latest();
  const lanes = new Lanes({ onMove: moved, onSelect: selected });
  const report = h("section.panel.report", { "aria-label": "Details", "aria-live": "polite" });
  const syncs = h("section.panel", { "aria-label": "Syncs" });
  const listing = h(
    "details.panel.listing",
    { ontoggle: () => list() },
    h("summary", {}, "Spans in view, as a list"),
    h("div"),
  );
  const follow = h("button", { "aria-pressed": "false", onclick: () => setFollowing(true) }, "Follow");
  const download = h("a.button", { download: "", title: "For ui.perfetto.dev" }, "Export to Perfetto");
  const panel = h(
    "section.panel",
    { "aria-label": "Lanes" },
    h(
      "header.tools",
      {},
      h(
        "div.segments",
        { role: "group", "aria-label": "Zoom" },
        h("button", { onclick: () => lanes.zoom(0.5), "aria-label": "Zoom in", title: "Key +" }, "+"),
        h("button", { onclick: () => lanes.zoom(2), "aria-label": "Zoom out", title: "Key −" }, "−"),
        h("button", { onclick: () => lanes.all(), title: "Key 0" }, "Whole run"),
      ),
      follow,
      h("span.muted.hint", {}, "Drag to move, Ctrl and wheel to zoom"),
      h("span.end", {}, download),
    ),
    h("div.body", {}, lanes.root),
  );
  const empty = h(
    "div.panel.empty",
    {},
    h("h2", {}, "Nothing on the timeline yet"),
    h("p", {}, "Spans appear as soon as trainer, gateway or an engine has finished its first phase."),
  );
  let data = null;
  let following = true;
  let loaded = [0, 0]; // what part of the run `data` covers, in seconds after its begin

  function setFollowing(yes) {
    following = yes;
    follow.setAttribute("aria-pressed", String(yes));
    if (!yes) return;
    address.change({ from: null, to: null });
    showEnd().catch(announceError);
  }

  /** Load and show the last seconds, as many as some steps take, unless the view is moved meanwhile. */
  async function showEnd(width = Math.min(60, Math.max(0.2, FIRST_STEPS * (run.latest?.step_seconds || 2)))) {
    await fetchSpans({ seconds: Math.max(1, width) });
    if (data && following) lanes.view(data.end - data.begin - 0.97 * width, data.end - data.begin + 0.03 * width);
  }

  const fetchPart = (from, to) => fetchSpans({ from: from.toFixed(6), to: to.toFixed(6) });

  async function fetchSpans(query) {
    data = await load(`runs/${run.id}/timeline`, { ...query, spans: SPANS });
    const hasSpans = data.end > data.begin; // of the run; the part that was asked for may have none
    empty.hidden = hasSpans;
    panel.hidden = listing.hidden = !hasSpans;
    if (!hasSpans) {
      data = null;
      return;
    }
    loaded = [data.from - data.begin, data.to - data.begin];
    const length = data.end - data.begin;
    lanes.show(data, data.begin, [-0.02 * length, length * 1.02]);
    list();
  }

  const reload = debounce(async () => {
    const width = lanes.to - lanes.from;
    const begin = lanes.begin;
    address.change({ from: (begin + lanes.from).toFixed(6), to: (begin + lanes.to).toFixed(6) });
    download.href = apiUrl(`runs/${run.id}/trace`, { from: begin + lanes.from, to: begin + lanes.to });
    const isCovered =
      lanes.from >= Math.max(loaded[0], 0) - 1e-9 && lanes.to <= Math.min(loaded[1], data.end - begin) + 0.02 * width;
    const isCoarse = data.aggregated && width < (loaded[1] - loaded[0]) / 4;
    try {
      if (!isCovered || isCoarse) await fetchPart(begin + lanes.from - width / 2, begin + lanes.to + width / 2);
      else list();
    } catch (error) {
      announceError(error);
    }
  }, 120);

  function moved() {
    following = false;
    follow.setAttribute("aria-pressed", "false");
    reload();
  }

  function selected(index, open) {
    if (index === null) return render(report);
    const { spans } = data;
    const version = spans.version[index];
    announce(
      `${data.lanes[spans.lane[index]]}: ${spans.name[index]}, ${duration(spans.end[index] - spans.start[index])}`,
    );
    showSpan(index);
    if (open && SYNC_NAMES.includes(spans.name[index]) && version !== null && version >= 0) openSync(version);
  }

  function showSpan(index) {
    const { spans } = data;
    const isSync = SYNC_NAMES.includes(spans.name[index]) && (spans.version[index] ?? -1) >= 0;
    const rows = [
      ["Lane", oneLine(data.lanes[spans.lane[index]])],
      [
        "Start",
        `${clock(spans.start[index])}, ${duration(spans.start[index] - data.begin)} after the start of the run`,
      ],
      ["Duration", duration(spans.end[index] - spans.start[index])],
      (spans.count?.[index] ?? 1) > 1 && ["Merged spans", integer(spans.count[index])],
      spans.step[index] && ["Step", integer(spans.step[index])],
      (spans.version[index] ?? -1) >= 0 && ["Version", integer(spans.version[index])],
      spans.detail?.[index] && ["Detail", oneLine(spans.detail[index], 300)],
    ].filter(Boolean);
    render(
      report,
      h(
        "header",
        {},
        h("h2", {}, spans.name[index]),
        isSync && h("button.end", { onclick: () => openSync(spans.version[index]) }, "Report of this sync"),
      ),
      h(
        "div.body",
        {},
        h(
          "dl.facts",
          {},
          rows.map(([name, value]) => [h("dt", {}, name), h("dd", {}, h("bdi", {}, value))]),
        ),
      ),
    );
  }

  async function openSync(version, { move = false } = {}) {
    address.change({ sync: version });
    try {
      const found = await loadReport(`runs/${run.id}/syncs/${version}`);
      render(report, syncReport(found));
      if (!move || !data) return;
      const [start, length] = [found.start - lanes.begin, found.phases.total];
      lanes.view(start - length, start + 2 * length);
      moved();
    } catch (error) {
      if (error.name !== "AbortError") render(report, h("div.body", { role: "alert" }, error.message));
    }
  }

  function list() {
    if (!listing.open || !data) return;
    const { spans } = data;
    const inView = lanes.order.filter(
      (index) => spans.end[index] - lanes.begin >= lanes.from && spans.start[index] - lanes.begin <= lanes.to,
    );
    update(
      listing.lastElementChild,
      h(
        "div.scroll.events",
        { tabindex: 0, role: "region", "aria-label": "Spans in view" },
        h(
          "table",
          {},
          h(
            "thead",
            {},
            h(
              "tr",
              {},
              ["Start", "Lane", "Span", "Duration", "Step", "Version"].map((name) => h("th", { scope: "col" }, name)),
            ),
          ),
          h(
            "tbody",
            {},
            inView
              .slice(0, LISTED)
              .map((index) =>
                h(
                  "tr",
                  {},
                  h("td", {}, `${(spans.start[index] - data.begin).toFixed(6)} s`),
                  h("td", {}, h("bdi", {}, oneLine(data.lanes[spans.lane[index]]))),
                  h("td", {}, h("button.link", { onclick: () => lanes.select(index, true) }, spans.name[index])),
                  h("td", {}, duration(spans.end[index] - spans.start[index])),
                  h("td", {}, integer(spans.step[index])),
                  h("td", {}, (spans.version[index] ?? -1) >= 0 ? integer(spans.version[index]) : "–"),
                ),
              ),
          ),
        ),
      ),
      inView.length > LISTED &&
        h("p.body.muted", {}, `The first ${LISTED} of ${integer(inView.length)}; zoom in to see the others.`),
    );
  }

  async function showSyncs() {
    const rows = await get(`runs/${run.id}/syncs`, { limit: 20 });
    update(
      syncs,
      rows.version?.length
        ? syncTable(rows, (version) => openSync(version, { move: true }))
        : h("div.body.muted", {}, "No sync yet."),
    );
  }

  render(root, panel, empty, report, listing, syncs);
  const [from, to] = [address.number("from"), address.number("to")];
  if (from !== null && to !== null && from < to) {
    await fetchPart(from - (to - from) / 2, to + (to - from) / 2);
    if (data) lanes.view(from - data.begin, to - data.begin);
    following = !data;
  } else await showEnd();
  if (data)
    download.href = apiUrl(`runs/${run.id}/trace`, { from: data.begin + lanes.from, to: data.begin + lanes.to });
  follow.hidden = run.state !== "live";
  follow.setAttribute("aria-pressed", String(following));
  await showSyncs();
  if (address.number("sync") !== null) await openSync(address.number("sync"));
  return {
    refresh: async () => {
      await showSyncs();
      if (following) await showEnd(data ? lanes.to - lanes.from : undefined);
    },
    redraw: () => lanes.draw(),
    destroy: () => lanes.destroy(),
  };
}
