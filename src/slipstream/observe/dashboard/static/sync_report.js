// The report of a weight sync: its phases, and what each engine did.

import { h } from "./dom.js";
import { bytes, clock, duration, fixed, integer, oneLine, signed } from "./format.js";

const PHASES = [
  ["plan", "grey"],
  ["send", "sky"],
  ["stage", "orange"],
  ["commit", "purple"],
];

export function syncReport(sync) {
  const { phases, engines } = sync;
  const known = PHASES.map(([name, colour]) => [name, colour, phases[name] ?? 0]);
  const rest = Math.max(0, phases.total - known.reduce((sum, [, , seconds]) => sum + seconds, 0));
  const parts = [...known, ["other", "line", rest]];
  const columns = [
    "Engine",
    "Transport",
    "Bytes",
    "Receive",
    "Verify",
    "Wait",
    "Pause",
    "Load",
    "Lost tokens",
    "Canary gap",
    "Checksums",
  ];
  return [
    h(
      "header",
      {},
      h("h2", {}, `Sync of version ${integer(sync.version)}`),
      h(
        "span.muted",
        {},
        [
          sync.step && `step ${integer(sync.step)}`,
          clock(sync.start),
          duration(phases.total),
          bytes(sync.bytes),
          `${bytes(sync.bytes_per_second)}/s`,
        ]
          .filter(Boolean)
          .join(" · "),
      ),
      sync.lost.length > 0 && h("span.pill.bad", {}, `not on ${sync.lost.map((name) => oneLine(name)).join(", ")}`),
    ),
    h(
      "div.body.stack",
      {},
      h(
        "div.phases",
        { "aria-hidden": "true" },
        parts.map(([, colour, seconds]) =>
          h("i", { style: { "--colour": `var(--${colour})`, flex: `${seconds / phases.total} 1 0` } }),
        ),
      ),
      h(
        "ul.legend",
        {},
        parts.map(([name, colour, seconds]) =>
          h(
            "li",
            {},
            h("span.key.box", { style: { "--colour": `var(--${colour})` } }),
            name,
            h("b", {}, duration(seconds)),
          ),
        ),
      ),
      h(
        "div.scroll",
        { tabindex: 0, role: "region", "aria-label": "Engines of this sync" },
        h(
          "table",
          {},
          h(
            "thead",
            {},
            h(
              "tr",
              {},
              columns.map((name, index) => h(`th${index > 1 && index < 10 ? ".number" : ""}`, { scope: "col" }, name)),
            ),
          ),
          h(
            "tbody",
            {},
            engines.map((engine) =>
              h(
                "tr",
                {},
                h("td", {}, h("bdi", {}, oneLine(engine.engine))),
                h("td", {}, oneLine(engine.transport)),
                [
                  bytes(engine.bytes),
                  duration(engine.receive),
                  duration(engine.verify),
                  duration(engine.wait),
                  duration(engine.pause),
                  duration(engine.load),
                  fixed(engine.lost_tokens, 1),
                  signed(engine.canary_gap, 4),
                ].map((text) => h("td.number", {}, text)),
                h("td", {}, engine.checksummed ? "compared" : "not compared"),
              ),
            ),
          ),
        ),
      ),
    ),
  ];
}

export function syncTable(rows, open) {
  return [
    h("header", {}, h("h2", {}, "Latest syncs"), h("span.muted", {}, "open one for its report")),
    h(
      "div.scroll",
      { tabindex: 0, role: "region", "aria-label": "Latest syncs" },
      h(
        "table",
        {},
        h(
          "thead",
          {},
          h(
            "tr",
            {},
            ["Version", "Step", "Time", "Whole sync", "Longest pause", "Bytes", "Engines", "Lost"].map((name) =>
              h("th.number", { scope: "col" }, name),
            ),
          ),
        ),
        h(
          "tbody",
          {},
          rows.version.map((version, index) =>
            h(
              "tr",
              {},
              h("td.number", {}, h("button.link", { onclick: () => open(version) }, integer(version))),
              h("td.number", {}, integer(rows.step[index])),
              h("td.number", {}, clock(rows.at[index])),
              h("td.number", {}, duration(rows.seconds[index])),
              h("td.number", {}, duration(rows.pause[index])),
              h("td.number", {}, bytes(rows.bytes[index])),
              h("td.number", {}, integer(countOf(rows.engines[index]))),
              h("td.number", {}, integer(countOf(rows.lost[index]))),
            ),
          ),
        ),
      ),
    ),
  ];
}

const countOf = (value) => (Array.isArray(value) ? value.length : value);
