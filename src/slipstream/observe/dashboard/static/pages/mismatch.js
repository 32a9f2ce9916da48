// Where the logprobs of trainer and engines differ: over steps, by engine, age and position, and the tokens that differ most.

import * as address from "../address.js";
import { get, latest } from "../api.js";
import { Chart, COLOURS, limited } from "../chart.js";
import { announceError, h, render } from "../dom.js";
import { compact, fixed, integer, number, oneLine, signed } from "../format.js";
import { TokenView } from "../tokens.js";

export const title = "Mismatch";

const POINTS = 400;
const CONTEXT = 24; // tokens on each side of an outlier
const nats = { format: (value) => number(value), unit: "nats per token" };

export async function mount(root, { run }) {
  const load = latest();
  let found = null;
  const zoomed = () => {
    const [from, to] = [address.number("from"), address.number("to")];
    return from !== null && to !== null && from < to ? [from, to] : null;
  };
  const onZoom = (zoom) => {
    const limits = limited(zoom, [1, Math.max(2, run.last_step)]);
    address.change({ from: limits && Math.floor(limits[0]), to: limits && Math.ceil(limits[1]) });
    return show().catch(announceError);
  };
  const overSteps = new Chart({
    title: "Difference of logprobs",
    ...nats,
    unit: "nats per token, logarithmic",
    log: true,
    wide: "wide",
    height: 230,
    onZoom,
  });
  const signedMean = new Chart({ title: "Direction", ...nats, unit: "trainer − engine, mean", onZoom });
  const byEngine = new Chart({ title: "By engine", ...nats, from: 0, onZoom });
  const byAge = new Chart({ title: "By staleness", ...nats, from: 0, onZoom });
  const byPosition = new Chart({
    wide: "double",
    title: "By position",
    unit: "nats per token, by position in the completion",
    format: number,
    xLabel: "token",
    bars: true,
    from: 0,
  });
  const histogram = new Chart({
    wide: "double",
    title: "Distribution",
    unit: "tokens by difference, nats",
    xLabel: "from",
    bars: true,
    format: integer,
    from: 0,
  });
  const charts = [overSteps, signedMean, byAge, byEngine, byPosition, histogram];
  const verdict = h("section.panel.verdict", { "aria-label": "Diagnosis" });
  const grid = h(
    "div.charts",
    {},
    charts.map((chart) => chart.root),
  );
  const worst = h("section.panel", { "aria-label": "Outliers" });
  const nothing = h("div.panel.empty");

  async function show() {
    const zoom = zoomed();
    found = await load(`runs/${run.id}/mismatch`, { points: POINTS, ...(zoom && { from: zoom[0], to: zoom[1] }) });
    const hasData =
      found.step.length > 0 &&
      Object.values(found.series).some((series) => series?.mean?.some((value) => value !== null));
    nothing.hidden = hasData;
    for (const part of [verdict, grid, worst]) part.hidden = !hasData;
    if (!hasData) {
      render(
        nothing,
        h("h2", {}, "No logprobs of the trainer yet"),
        h(
          "p",
          {},
          "After every update the recorder compares the trainer's logprob of each token with the engine's. Nothing has been compared in this run so far.",
        ),
      );
      return;
    }
    const { series, threshold, step: x } = found;
    const lines = [
      ["p50", "median", "sky", 2],
      ["mean", "mean", "blue", 0],
      ["p99", "99th percentile", "orange", 1],
      ["max", "largest", "vermillion", 2],
    ]
      .filter(([name]) => series[name])
      .map(([name, label, colour, dash]) => ({
        label,
        colour,
        dash,
        values: ((name === "max" && series.max.max) || series[name].mean).map((value) => (value > 0 ? value : null)),
      }));
    if (threshold)
      lines.push({ label: "explained by rounding", colour: "grey", dash: 3, values: x.map(() => threshold) });
    overSteps.show({ x, lines, zoom });
    signedMean.show({
      x,
      zoom,
      lines: series.signed ? [{ label: "mean", colour: "blue", values: series.signed.mean }] : [],
    });
    byEngine.show({ x, zoom, lines: parts(found.by_engine, (name) => oneLine(name, 30)) });
    byAge.show({ x, zoom, lines: parts(found.by_staleness, (age) => (age === "0" ? "fresh" : `${age} behind`)) });
    showBars(byPosition, "mean", found.by_position?.edges, found.by_position?.mean);
    showBars(histogram, "tokens", found.histogram?.edges, found.histogram?.tokens);
    showVerdict();
    showWorst();
  }

  function parts(groups, label) {
    return Object.entries(groups ?? {})
      .slice(0, COLOURS.length)
      .map(([name, values], index) => ({ label: label(name), colour: COLOURS[index], dash: index % 4, values }));
  }

  /** Bars by the lower edge of their bin, up to the last one that is not empty. */
  function showBars(chart, label, edges = [], all = []) {
    const values = all.slice(0, all.findLastIndex((value) => value) + 1);
    chart.xFormat = (index) => (edges[index] === undefined ? "" : compact(edges[index]));
    chart.show({ x: values.map((_, index) => index), lines: [{ label, colour: "blue", values }] });
  }

  function showVerdict() {
    const { sentence: sentences = [], step: steps = [] } = found.diagnoses ?? {};
    const newest = steps.map((_, index) => index).sort((a, b) => steps[b] - steps[a]);
    const [last] = newest;
    const fresh = found.by_staleness?.["0"]?.findLast((value) => value !== null);
    const isKnown = found.threshold && fresh !== undefined;
    const isLarge = fresh > found.threshold;
    render(
      verdict,
      h(
        "header",
        {},
        h("h2", {}, "Diagnosis"),
        isKnown &&
          h(
            `span.pill.${isLarge ? "warn" : "good"}`,
            {},
            isLarge ? "fresh tokens differ" : "fresh tokens within rounding",
          ),
        newest.length > 0 && h("span.muted", {}, `of step ${integer(steps[last])}`),
      ),
      h(
        "div.body.stack",
        {},
        h("p", {}, newest.length ? sentences[last] : "This run was not diagnosed; diagnose_every turns it on."),
        newest.length > 1 &&
          h(
            "details",
            {},
            h("summary", {}, `Earlier diagnoses (${newest.length - 1})`),
            h(
              "dl.facts",
              {},
              newest
                .slice(1, 51)
                .map((index) => [h("dt", {}, `step ${integer(steps[index])}`), h("dd", {}, sentences[index])]),
            ),
          ),
      ),
    );
  }

  function showWorst() {
    const rows = found.worst ?? [];
    const open = address.get("outlier");
    render(
      worst,
      h("header", {}, h("h2", {}, "Largest differences"), h("span.muted", {}, "open one to see its context")),
      rows.length
        ? h(
            "div.scroll",
            { tabindex: 0, role: "region", "aria-label": "Tokens with the largest differences" },
            h(
              "table",
              {},
              h(
                "thead",
                {},
                h(
                  "tr",
                  {},
                  ["Step", "Token", "Trainer − engine", "Trainer", "Engine", "Position", "Stale", "Engine name"].map(
                    (name, index) =>
                      h(`th${[0, 2, 3, 4, 5, 6].includes(index) ? ".number" : ""}`, { scope: "col" }, name),
                  ),
                ),
              ),
              h(
                "tbody",
                {},
                rows.map((row) => outlier(row, `${row.id}@${row.position}` === open)),
              ),
            ),
          )
        : h("div.body.muted", {}, "None in these steps."),
    );
  }

  function outlier(row, isOpen) {
    const context = h("tr", { hidden: true }, h("td", { colspan: 8 }));
    const button = h("button.link", { "aria-expanded": "false", onclick: () => toggle() }, integer(row.step));
    async function toggle() {
      context.hidden = !context.hidden;
      button.setAttribute("aria-expanded", String(!context.hidden));
      address.change({ outlier: context.hidden ? null : `${row.id}@${row.position}` });
      if (context.hidden || context.firstChild.firstChild) return;
      const view = new TokenView();
      const link = h(
        "a",
        {
          href: address.href("rollouts", {
            row: row.id,
            token: row.position,
            colour: "gap",
            from: row.step,
            to: row.step,
          }),
        },
        "Open the completion",
      );
      render(context.firstChild, h("div.stack", {}, h("p", {}, link), view.root));
      try {
        const sample = await get(`runs/${run.id}/rollouts/${row.id}`, {
          from: Math.max(0, row.position - CONTEXT),
          to: row.position + CONTEXT + 1,
        });
        view.show(sample, "gap");
        view.elements[row.position - sample.from]?.classList.add("active");
      } catch (error) {
        render(context.firstChild, h("p.notice.warn", { role: "alert" }, error.message));
      }
    }
    if (isOpen) toggle();
    return [
      h(
        "tr",
        {},
        h("td.number", {}, button),
        h("td", {}, h("code", {}, h("bdi", {}, JSON.stringify(oneLine(row.token, 30))))),
        h("td.number", {}, signed(row.gap, 4)),
        h("td.number", {}, fixed(row.trainer_logprob, 4)),
        h("td.number", {}, fixed(row.engine_logprob, 4)),
        h("td.number", {}, integer(row.position)),
        h("td.number", {}, number(row.staleness)),
        h("td", {}, h("bdi", {}, oneLine(row.engine))),
      ),
      context,
    ];
  }

  render(root, nothing, verdict, grid, worst);
  await show();
  return {
    refresh: () => (address.get("outlier") ? null : show()),
    redraw: () => charts.forEach((chart) => chart.draw()),
    destroy: () => charts.forEach((chart) => chart.destroy()),
  };
}
