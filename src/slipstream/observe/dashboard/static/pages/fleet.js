// The engines: state, load and speed, how a version reached each of them, and what happened to them.

import * as address from "../address.js";
import { latest } from "../api.js";
import { Chart, COLOURS } from "../chart.js";
import { h, render, update } from "../dom.js";
import { ago, clock, compact, duration, integer, number, oneLine, percent, percentLabel, plural } from "../format.js";
import { FAULTS } from "../lanes.js";
import { Spread } from "../spread.js";

export const title = "Fleet";

const TONES = {
  ready: "good",
  empty: "",
  asleep: "",
  draining: "warn",
  drained: "warn",
  stale: "warn",
  quarantined: "bad",
  lost: "bad",
};
const POINTS = 240;
const SHOWN_EVENTS = 100;
const MAX_LINES = COLOURS.length;

export async function mount(root, { run }) {
  const load = latest();
  const engines = h("section.panel", { "aria-label": "Engines" });
  const events = h("section.panel", { "aria-label": "Events" });
  const spread = new Spread(run, (version) => address.change({ version }));
  const options = { xLabel: "after", xFormat: duration, from: 0, height: 160 };
  const charts = {
    tokens_per_second: new Chart({ title: "Speed", unit: "tokens per second", format: integer, ...options }),
    requests: new Chart({ title: "Load", unit: "requests in flight", format: integer, ...options }),
    kv_use: new Chart({
      title: "KV cache in use",
      unit: "share of pages",
      format: percent,
      axisFormat: percentLabel,
      to: 1,
      ...options,
    }),
    prefix_hit_share: new Chart({
      title: "Prefix cache hits",
      unit: "share of prompt tokens",
      format: percent,
      axisFormat: percentLabel,
      to: 1,
      ...options,
    }),
  };
  const grid = h(
    "div.charts.four",
    {},
    Object.values(charts).map((chart) => chart.root),
  );
  let kind = address.get("kind");
  let shownEvents = null;
  const eventList = h("div");
  const kindSelect = h(
    "select",
    {
      onchange: () => {
        kind = kindSelect.value;
        address.change({ kind });
        showEvents(shownEvents);
      },
    },
    h("option", { value: "" }, "all"),
  );
  render(
    events,
    h("header", {}, h("h2", {}, "Events"), h("span.muted", {}, "newest first"), h("label.end", {}, "Kind", kindSelect)),
    eventList,
  );

  async function show() {
    const fleet = await load(`runs/${run.id}/fleet`, { points: POINTS });
    if (!fleet.engines.length) {
      render(
        engines,
        h(
          "div.empty",
          {},
          h("h2", {}, "No engine yet"),
          h(
            "p",
            {},
            "Engines appear here as soon as they have registered at the gateway. Loading a model and compiling can take minutes.",
          ),
        ),
      );
    } else {
      update(
        engines,
        h(
          "header",
          {},
          h("h2", {}, plural(fleet.engines.length, "engine")),
          h(
            "span.muted",
            {},
            `policy version ${integer(fleet.version)}, ${run.state === "live" ? `as of ${ago(fleet.at)}` : "as last recorded"}`,
          ),
        ),
        table(fleet),
      );
    }
    grid.hidden = !fleet.engines.length;
    for (const [column, chart] of Object.entries(charts)) {
      const lines = Object.entries(fleet.series.engines ?? {})
        .filter(([, series]) => series[column])
        .slice(0, MAX_LINES)
        .map(([name, series], index) => ({
          label: oneLine(name, 40),
          colour: COLOURS[index % COLOURS.length],
          dash: index % 4,
          values: series[column],
        }));
      chart.root.hidden = !lines.some(({ values }) => values.some((value) => value !== null));
      if (!chart.root.hidden) chart.show({ x: fleet.series.at.map((at) => at - run.started), lines });
    }
    spread.show(
      fleet.commits,
      fleet.engines.map(({ name }) => name),
      address.number("version"),
    );
    showEvents({ kind: [], ...fleet.events });
  }

  function showEvents(all) {
    shownEvents = all;
    const kinds = [...new Set(all.kind)].sort();
    const order = all.kind
      .map((_, index) => index)
      .filter((index) => !kind || all.kind[index] === kind)
      .reverse();
    const picked = kind && !kinds.includes(kind) ? [...kinds, kind] : kinds;
    if (
      [...kindSelect.options]
        .slice(1)
        .map(({ value }) => value)
        .join() !== picked.join()
    )
      render(
        kindSelect,
        h("option", { value: "" }, "all"),
        picked.map((name) => h("option", { value: name, selected: name === kind }, name)),
      );
    update(
      eventList,
      order.length
        ? h(
            "div.scroll.events",
            { tabindex: 0, role: "region", "aria-label": "List of events" },
            h(
              "table",
              {},
              h(
                "thead",
                {},
                h(
                  "tr",
                  {},
                  ["Time", "Kind", "Engine", "Version", "Detail"].map((name) => h("th", { scope: "col" }, name)),
                ),
              ),
              h(
                "tbody",
                {},
                order.slice(0, SHOWN_EVENTS).map((index) =>
                  h(
                    "tr",
                    {},
                    h(
                      "td.nowrap",
                      {},
                      h(
                        "a",
                        {
                          href: address.href("timeline", {
                            from: (all.at[index] - 1).toFixed(6),
                            to: (all.at[index] + 1).toFixed(6),
                          }),
                          title: "Show in the timeline",
                        },
                        clock(all.at[index]),
                      ),
                    ),
                    h("td", {}, h(`span.pill${FAULTS.includes(all.kind[index]) ? ".bad" : ""}`, {}, all.kind[index])),
                    h("td.nowrap", {}, h("bdi", {}, oneLine(all.engine[index] ?? ""))),
                    h("td", {}, (all.version[index] ?? -1) >= 0 ? integer(all.version[index]) : ""),
                    h("td.detail", {}, h("bdi", {}, oneLine(all.detail[index] ?? "", 240))),
                  ),
                ),
              ),
            ),
          )
        : h("div.body.muted", {}, "None"),
    );
  }

  render(root, engines, spread.root, grid, events);
  await show();
  return {
    refresh: show,
    redraw: () => Object.values(charts).forEach((chart) => chart.draw()),
    destroy: () => Object.values(charts).forEach((chart) => chart.destroy()),
  };
}

function table(fleet) {
  const now = fleet.at;
  const columns = [
    "Engine",
    "State",
    "Doing now",
    "Version",
    "Load",
    "KV cache",
    "Prefix hits",
    "Tokens/s",
    "Speed",
    "Errors",
  ];
  return h(
    "div.scroll",
    { tabindex: 0, role: "region", "aria-label": "Table of engines" },
    h(
      "table.engines",
      {},
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          columns.map((name, index) => h(`th${index > 2 ? ".number" : ""}`, { scope: "col" }, name)),
        ),
      ),
      h(
        "tbody",
        {},
        fleet.engines.map((engine) => {
          const place = [
            engine.kind,
            engine.host?.slice(0, 12),
            engine.devices?.length && `GPU ${engine.devices.join(", ")}`,
            engine.pid && `pid ${engine.pid}`,
          ];
          const behind = fleet.version - engine.version;
          const cells = [
            [
              h("b", {}, h("bdi", {}, oneLine(engine.name))),
              h("small.muted", {}, h("bdi", {}, oneLine(place.filter(Boolean).join(" · ")))),
            ],
            [
              h(`span.pill${TONES[engine.state] && `.${TONES[engine.state]}`}`, {}, engine.state),
              engine.note && h("small.muted", {}, h("bdi", {}, oneLine(engine.note, 160))),
            ],
            [
              engine.state === "lost" ? "–" : engine.doing,
              engine.state !== "lost" &&
                engine.doing_since &&
                h("small.muted", {}, `for ${duration(Math.max(0, now - engine.doing_since))}`),
            ],
            [
              engine.version < 0 ? "none" : integer(engine.version),
              behind > 0 && engine.version >= 0 && h("small.muted", {}, `${behind} behind`),
            ],
            [
              integer(engine.requests),
              bar(engine.requests / engine.max_num_seqs, `of ${integer(engine.max_num_seqs)} sequences`),
            ],
            [percent(engine.kv_use), bar(engine.kv_use, "of the KV cache")],
            [percent(engine.prefix_hit_share), bar(engine.prefix_hit_share, "of prompt tokens")],
            [compact(engine.tokens_per_second)],
            [engine.speed ? `${number(engine.speed)} ×` : "–"],
            [integer(engine.faults), engine.circuit !== "closed" && h("small.muted", {}, `circuit ${engine.circuit}`)],
          ];
          return h(
            "tr",
            {},
            cells.map((content, index) =>
              h(`td${index > 2 ? ".number" : ""}`, { "data-label": columns[index] }, h("div", {}, content)),
            ),
          );
        }),
      ),
    ),
  );
}

function bar(share, text) {
  if (typeof share !== "number" || !Number.isFinite(share)) return null;
  return h(
    "span.bar",
    { role: "img", "aria-label": `${percent(share)} ${text}`, title: `${percent(share)} ${text}` },
    h("i", { style: { width: `${100 * Math.min(1, share)}%` } }),
  );
}
