// Line, stacked and point charts over uPlot: one design, a legend with values, zoom by mouse and keyboard, shared cursor.

import { announce, h, render } from "./dom.js";
import { compact, number } from "./format.js";

export const COLOURS = ["blue", "vermillion", "green", "purple", "orange", "sky", "brown", "grey"];
export const DASHES = [[], [7, 4], [2, 3], [10, 3, 2, 3]];
const KEYS = ["", "dash", "dots", "dash"];

/** The value of a colour of the theme. */
export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

/** The mean of each value and of up to `width` − 1 values before it; null stays null. */
export function smooth(values, width) {
  if (width <= 1) return values;
  let sum = 0;
  let count = 0;
  const recent = [];
  return values.map((value) => {
    if (value === null || value === undefined) return null;
    recent.push(value);
    sum += value;
    count += 1;
    if (count > width) {
      sum -= recent[recent.length - 1 - width];
      count = width;
    }
    return sum / count;
  });
}

/** The median of each value and of up to `width` − 1 values before it: a single outlier does not show. */
export function medians(values, width) {
  if (width <= 1) return values;
  return values.map((_, index) => {
    const recent = values
      .slice(Math.max(0, index - width + 1), index + 1)
      .filter((value) => value !== null)
      .sort((a, b) => a - b);
    return recent.length ? recent[Math.floor((recent.length - 1) / 2)] : null;
  });
}

/** Series over different positions on one sorted axis: `[xs, [values, …]]`, null where a series has nothing. */
export function align(parts) {
  const xs = [...new Set(parts.flatMap(({ x }) => x))].sort((a, b) => a - b);
  const places = new Map(xs.map((x, index) => [x, index]));
  return [
    xs,
    parts.map(({ x, y }) => {
      const values = new Array(xs.length).fill(null);
      x.forEach((at, index) => (values[places.get(at)] = y[index] ?? null));
      return values;
    }),
  ];
}

/**
 * A panel with a chart. `show({x, lines, zoom})` draws it: each line is `{label, values, colour, dash, points, quiet, low,
 * high}`, where quiet lines are drawn thin and without legend, and `low` and `high` are the values of a band around it.
 */
export class Chart {
  constructor({
    title,
    unit = "",
    format = number,
    axisFormat = compact,
    xLabel = "step",
    xFormat = compact,
    stacked = false,
    bars = false,
    log = false,
    from = null,
    to = null,
    wide = "",
    onZoom = null,
    height = 190,
  }) {
    Object.assign(this, { title, format, axisFormat, xLabel, xFormat, stacked, bars, log, from, to, onZoom, height });
    this.value = h("span.value");
    this.plot = h("div.plot", {
      tabindex: 0,
      role: "group",
      "aria-roledescription": "chart",
      onkeydown: (e) => this.key(e),
      style: { "min-height": `${height}px` },
    });
    this.legend = h("ul.legend");
    this.root = h(
      `section.panel.chart${wide && `.${wide}`}`,
      {},
      h("header", {}, h("h2", {}, title), h("span.unit", {}, unit), this.value),
      this.plot,
      this.legend,
    );
    this.unit = unit;
    this.observer = new ResizeObserver(() => this.chart?.setSize(this.size()));
    this.observer.observe(this.plot);
  }

  show({ x, lines, zoom = null }) {
    const shown = lines.filter(({ values }) => values.some((value) => value !== null && value !== undefined));
    this.zoom = zoom;
    this.lines = shown;
    this.x = x;
    this.visible = shown.filter(({ quiet }) => !quiet);
    this.plot.setAttribute("aria-label", this.summary());
    if (!shown.length) {
      this.remove();
      render(this.plot, h("p.empty", {}, "Nothing recorded yet"));
      render(this.legend);
      render(this.value);
      return;
    }
    this.draw();
    this.tell(null);
  }

  /** Draw again: with other data, or in another theme. */
  draw() {
    if (!this.lines?.length) return;
    const { series, bands, data } = this.stacked ? this.stack() : this.overlay();
    const shape = JSON.stringify([
      document.documentElement.dataset.theme,
      series.map(({ label, key }) => [label, key]),
      bands.length,
    ]);
    if (this.chart && shape === this.shape) {
      this.chart.setData(data);
      return;
    }
    const cursor = this.chart?.cursor.idx ?? null;
    this.remove();
    this.shape = shape;
    render(this.plot);
    this.chart = new uPlot(this.options(series, bands), data, this.plot);
    if (cursor !== null) this.point(cursor);
  }

  overlay() {
    const series = [{}];
    const data = [this.x];
    const bands = [];
    for (const line of this.lines) {
      const stroke = colour(line.colour);
      if (line.low && !line.quiet) {
        bands.push({ series: [series.length, series.length + 1], fill: `${stroke}26` });
        series.push(
          { label: "high", key: 0, points: { show: false } },
          { label: "low", key: 0, points: { show: false } },
        );
        data.push(line.high, line.low);
      }
      series.push({
        label: line.label,
        key: `${line.colour}${line.dash ?? 0}${line.quiet ?? ""}${line.points ?? ""}`,
        stroke: line.quiet ? `${stroke}4d` : stroke,
        width: line.quiet ? 1 : 2,
        spanGaps: true,
        dash: DASHES[line.dash ?? 0],
        ...(this.bars && { paths: uPlot.paths.bars({ size: [0.9, 60] }), fill: `${stroke}b3`, width: 0 }),
        points: { show: line.points === true || this.x.length === 1, size: 6, fill: stroke, stroke },
      });
      data.push(line.values);
    }
    return { series, bands, data };
  }

  /** Lines on top of each other, the last one at the bottom. */
  stack() {
    const sums = new Array(this.x.length).fill(0);
    const layers = this.lines
      .map((line) => {
        line.values.forEach((value, index) => (sums[index] += value ?? 0));
        return { line, top: [...sums] };
      })
      .reverse();
    const sorted = [...sums].sort((a, b) => a - b);
    this.usual = sorted[Math.floor(0.97 * (sorted.length - 1))];
    return {
      series: [
        {},
        ...layers.map(({ line }, index) => ({
          label: line.label,
          key: line.colour,
          stroke: colour(line.colour),
          width: 1,
          points: { show: this.x.length === 1 },
          fill: index === layers.length - 1 ? `${colour(line.colour)}b3` : undefined,
        })),
      ],
      bands: layers
        .slice(1)
        .map((_, index) => ({ series: [index + 1, index + 2], fill: `${colour(layers[index].line.colour)}b3` })),
      data: [this.x, ...layers.map(({ top }) => top)],
    };
  }

  size() {
    return { width: Math.max(160, this.plot.clientWidth - 16), height: this.height };
  }

  options(series, bands) {
    const font = `11px ${getComputedStyle(document.body).fontFamily}`;
    const axis = {
      stroke: colour("muted"),
      font,
      grid: { stroke: colour("line"), width: 1 },
      ticks: { show: false },
      gap: 4,
    };
    return {
      ...this.size(),
      padding: [8, 12, 0, 0],
      legend: { show: false },
      cursor: {
        y: false,
        drag: { x: true, y: false, setScale: false },
        points: { size: 7 },
        sync: { key: this.xLabel, filters: { pub: (type) => type !== "mousedown" && type !== "mouseup" } },
        bind: { dblclick: () => () => this.onZoom?.(null) },
      },
      scales: {
        x: {
          time: false,
          range: (_, low, high) =>
            this.zoom ?? (low === high ? [low - 1, high + 1] : this.bars ? [low - 0.6, high + 0.6] : [low, high]),
        },
        y: this.log ? { distr: 3 } : { range: (_, low, high) => this.range(low, high) },
      },
      axes: [
        {
          ...axis,
          size: 24,
          space: 64,
          ...(this.bars && { incrs: [1, 2, 5, 10] }),
          values: (_, splits) => splits.map((x) => this.xFormat(x)),
        },
        {
          ...axis,
          size: 50,
          space: 34,
          values: (_, splits, axisIndex, space, step) =>
            splits.map((y) => (y === null ? "" : this.axisFormat(y, this.log ? undefined : step))),
          ...(this.log && {
            grid: { ...axis.grid, filter: (_, splits) => splits.map((y) => (isPowerOfTen(y) ? y : null)) },
          }),
        },
      ],
      series,
      bands,
      hooks: {
        setSelect: [(chart) => this.selected(chart)],
        setCursor: [(chart) => this.tell(chart.cursor.idx ?? null)],
      },
    };
  }

  range(low, high) {
    if (low === null || low === undefined) return [0, 1];
    // The first step compiles, and would flatten all others.
    if (this.stacked && high > 2 * this.usual && !this.zoom) return [0, 1.3 * this.usual];
    const margin = 0.06 * (high - low) || Math.abs(high) * 0.1 || 1;
    const isNearZero = low >= 0 && low < 0.6 * high;
    const bottom = this.from ?? (isNearZero || this.stacked ? Math.min(0, low) : low - margin);
    return [bottom, this.to === null ? high + margin : Math.max(1.04 * this.to, high)];
  }

  selected(chart) {
    const { left, width } = chart.select;
    if (width < 4) return;
    chart.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    this.onZoom?.([chart.posToVal(left, "x"), chart.posToVal(left + width, "x")]);
  }

  /** The legend, with the values under the cursor or else the last ones. */
  tell(index) {
    const isLast = index === null;
    const isSingle = this.visible.length === 1 && !this.bars;
    const at = (values) => (isLast ? values.findLast((value) => value !== null && value !== undefined) : values[index]);
    render(
      this.legend,
      [...this.visible].map(({ label, values, colour: name, dash = 0, points }) =>
        h(
          "li",
          {},
          h(`span.key${this.stacked || points === true ? ".box" : KEYS[dash] && `.${KEYS[dash]}`}`, {
            style: { "--colour": `var(--${name})` },
          }),
          label,
          !(isLast && isSingle) && h("b", {}, this.format(at(values))),
        ),
      ),
      !isLast && h("li.at", {}, `${this.xLabel} ${this.xFormat(this.x[index])}`),
    );
    if (isLast) render(this.value, isSingle && this.format(at(this.visible[0].values)));
  }

  summary() {
    const parts = (this.visible ?? []).slice(0, 8).map(({ label, values }) => {
      const known = values.filter((value) => value !== null && value !== undefined);
      return `${label} ${this.format(known[0])} to ${this.format(known[known.length - 1])}`;
    });
    return `${this.title}${this.unit && `, ${this.unit}`}: ${parts.join("; ") || "nothing recorded yet"}`;
  }

  key(event) {
    if (!this.chart || event.ctrlKey || event.metaKey || event.altKey) return;
    const { min, max } = this.chart.scales.x;
    const span = max - min;
    const middle = this.x[this.chart.cursor.idx] ?? (min + max) / 2;
    const actions = {
      "+": () => this.onZoom?.([middle - span / 4, middle + span / 4]),
      "-": () => this.onZoom?.([middle - span, middle + span]),
      0: () => this.onZoom?.(null),
      Escape: () => this.onZoom?.(null),
      ArrowLeft: () => (event.shiftKey ? this.onZoom?.([min - span / 4, max - span / 4]) : this.step(-1)),
      ArrowRight: () => (event.shiftKey ? this.onZoom?.([min + span / 4, max + span / 4]) : this.step(1)),
      Home: () => this.point(0),
      End: () => this.point(this.x.length - 1),
    };
    const action = actions[event.key === "=" ? "+" : event.key];
    if (!action) return;
    event.preventDefault();
    event.stopPropagation();
    action();
  }

  step(by) {
    const index = this.chart.cursor.idx;
    this.point(
      Math.min(this.x.length - 1, Math.max(0, index === null || index === undefined ? this.x.length - 1 : index + by)),
    );
  }

  point(index) {
    if (index >= this.x.length) return;
    this.chart.setCursor({ left: this.chart.valToPos(this.x[index], "x"), top: 10 }, true, true);
    const values = this.visible.map(({ label, values: all }) => `${label} ${this.format(all[index])}`);
    announce(`${this.xLabel} ${this.xFormat(this.x[index])}: ${values.join(", ")}`);
  }

  remove() {
    this.chart?.destroy();
    this.chart = null;
  }

  destroy() {
    this.observer.disconnect();
    this.remove();
  }
}

const isPowerOfTen = (value) => Math.abs(Math.log10(value) - Math.round(Math.log10(value))) < 1e-6;

/** A zoom, within the limits of the data; null if it shows everything. */
export function limited(zoom, [low, high]) {
  if (!zoom) return null;
  const width = Math.max(Math.min(zoom[1] - zoom[0], high - low), (high - low) * 1e-6);
  const start = Math.min(Math.max(zoom[0], low), high - width);
  return width >= high - low ? null : [start, start + width];
}
