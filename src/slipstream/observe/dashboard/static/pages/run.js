// The course of training: reward, losses, lengths, speed and time, of one run or several.

import * as address from "../address.js";
import { get } from "../api.js";
import { Chart, COLOURS, align, limited, medians, smooth } from "../chart.js";
import { announceError, h, render } from "../dom.js";
import { compact, duration, fixed, integer, number, percent, percentLabel, plural } from "../format.js";

export const title = "Run";

const seconds = { format: duration, axisFormat: duration, unit: "per step", from: 0 };
const share = { format: (value) => percent(value, 1), axisFormat: percentLabel, from: 0 };

/** One chart each; the first column is the one that runs are compared by. */
const CHARTS = [
  { title: "Reward", columns: { rollout_reward: "reward" }, wide: "double", height: 230 },
  {
    title: "Accuracy",
    columns: { rollout_accuracy: "rollouts" },
    evaluations: true,
    ...share,
    to: 1,
    wide: "double",
    height: 230,
  },
  {
    title: "KL",
    unit: "nats per token",
    columns: { train_kl: "from the engines' policy", train_reference_kl: "from the reference" },
  },
  { title: "Entropy", unit: "nats per token", columns: { train_entropy: "entropy" }, from: 0 },
  { title: "Clipped ratios", unit: "share of tokens", columns: { train_clip_share: "clipped" }, ...share },
  {
    title: "Length",
    unit: "tokens",
    columns: { rollout_length_mean: "mean", rollout_length_max: "longest" },
    exact: ["rollout_length_max"],
    from: 0,
  },
  {
    title: "Staleness",
    unit: "versions",
    columns: { rollout_staleness_mean: "mean", rollout_staleness_max: "oldest" },
    exact: ["rollout_staleness_max"],
    from: 0,
  },
  {
    title: "Speed",
    unit: "tokens per second",
    columns: { rollout_tokens_per_second: "tokens/s" },
    format: integer,
    from: 0,
  },
  {
    title: "Groups without signal",
    unit: "share of groups",
    columns: { rollout_zero_variance: "zero variance", rollout_truncated: "completions cut off" },
    ...share,
  },
  { title: "Gradient norm", unit: "before clipping", columns: { train_gradient_norm: "norm" }, from: 0 },
  {
    title: "Weight sync",
    ...seconds,
    unit: "per sync",
    columns: { sync_seconds: "whole sync", sync_pause_seconds: "engines paused" },
  },
  { title: "Loss", columns: { train_loss: "loss" } },
  { title: "Importance ratio", unit: "mean over tokens", columns: { train_ratio: "ratio" } },
  { title: "Logprob gap", unit: "nats per token", columns: { train_gap: "trainer and engine" }, from: 0 },
];

const PHASES = [
  ["seconds_prepare", "prepare", "grey"],
  ["seconds_generate", "generate", "blue"],
  ["seconds_reward", "reward", "purple"],
  ["seconds_train", "train", "orange"],
  ["seconds_sync", "sync", "green"],
  ["seconds_sleep", "sleep", "brown"],
  ["seconds_wake", "wake", "vermillion"],
  ["seconds_diagnose", "diagnose", "sky"],
];

const EVALUATIONS = [
  ["sampled_heldout", "held-out, sampled", "orange"],
  ["greedy_heldout", "held-out, greedy", "green"],
];

const COLUMNS = [...CHARTS.flatMap(({ columns }) => Object.keys(columns)), ...PHASES.map(([column]) => column)];
const POINTS = 400;

export async function mount(root, { run, runs }) {
  let loaded = []; // per run: {run, steps, evaluations, colour, dash}
  let loads = 0; // counts calls of `load`, of which the last one wins
  const zoomed = () => {
    const [from, to] = [address.number("from"), address.number("to")];
    return from !== null && to !== null && from < to ? [from, to] : null;
  };
  const onZoom = (zoom) => {
    const limits = limited(zoom, extent(loaded, address.get("x")));
    address.change({ from: limits && Number(limits[0].toFixed(2)), to: limits && Number(limits[1].toFixed(2)) });
    return loaded.some(({ steps }) => steps.stride > 1) ? load().then(draw, announceError) : draw();
  };
  const time = new Chart({ title: "Step time by phase", ...seconds, stacked: true, wide: "wide", height: 220, onZoom });
  const charts = CHARTS.map((options) => new Chart({ ...options, onZoom }));
  const figures = h("dl.figures", { "aria-label": "Latest step" });
  const zoomButton = h("button", { onclick: () => onZoom(null) }, "Show all");
  const smoothing = h("input", {
    type: "range",
    min: 1,
    max: 50,
    value: address.number("smooth") ?? 10,
    id: "smooth",
    oninput: () => {
      address.change({ smooth: smoothing.value === "10" ? null : smoothing.value });
      draw();
    },
  });
  const smoothed = h("output", { for: "smooth" });
  const axis = (name, label) =>
    h(
      "button",
      {
        "data-x": name,
        onclick: () => {
          address.change({ x: name === "step" ? null : name, from: null, to: null });
          load().then(draw, announceError);
        },
      },
      label,
    );
  const axes = h(
    "div.segments",
    { role: "group", "aria-label": "Horizontal axis" },
    axis("step", "Steps"),
    axis("time", "Time"),
  );
  const grid = h("div.charts");
  const nothing = h("div.panel.empty");

  async function load() {
    const turn = ++loads;
    const zoom = address.get("x") === "time" ? null : zoomed();
    const found = await Promise.all(
      runs.map(async (entry, index) => {
        const range = zoom && { from: Math.max(1, Math.floor(zoom[0])), to: Math.ceil(zoom[1]) };
        const detail = await get(`runs/${entry.id}`);
        const columns = COLUMNS.filter((name) => detail.metrics.includes(name)).join(",");
        const steps = await get(`runs/${entry.id}/steps`, { points: POINTS, columns, ...range });
        return { run: { ...entry, ...detail }, steps, colour: COLOURS[index % COLOURS.length], dash: index % 4 };
      }),
    );
    if (turn === loads) loaded = found;
  }

  function draw() {
    const byTime = address.get("x") === "time";
    const zoom = zoomed();
    const hasSteps = loaded.some(({ steps }) => steps.step.length);
    const width = Number(smoothing.value);
    render(smoothed, width > 1 ? plural(width, "step") : "off");
    for (const button of axes.children)
      button.setAttribute("aria-pressed", String((button.dataset.x === "time") === byTime));
    zoomButton.hidden = !zoom;
    if (zoom)
      zoomButton.textContent = byTime ? "Show all" : `Steps ${integer(zoom[0])} to ${integer(zoom[1])}: show all`;
    showFigures(figures, loaded[0].run);
    nothing.hidden = hasSteps;
    grid.hidden = tools.hidden = !hasSteps;
    if (!hasSteps) return showWaiting(nothing, loaded[0].run);
    const view = { width, zoom, byTime };
    charts.forEach((chart, index) => {
      Object.assign(chart, byTime ? { xLabel: "after", xFormat: duration } : { xLabel: "step", xFormat: compact });
      const options = CHARTS[index];
      const data = loaded.length > 1 ? compared(loaded, options, view) : single(loaded[0], options, view);
      chart.root.hidden = !data.lines.some(({ values }) => values.some((value) => value !== null));
      chart.show({ ...data, zoom });
    });
    Object.assign(time, { xLabel: charts[0].xLabel, xFormat: charts[0].xFormat });
    time.show({ ...phases(loaded[0], view), zoom });
    time.root.querySelector(".unit").textContent =
      loaded.length > 1 ? `per step, of ${loaded[0].run.name}` : "per step";
  }

  const tools = h(
    "div.tools",
    {},
    h("label", {}, "Smoothing", smoothing, smoothed),
    h("label", {}, "Over", axes),
    zoomButton,
    h("span.muted.hint", {}, "Drag to zoom, double-click to show all"),
  );
  grid.append(
    ...charts.slice(0, 2).map(({ root: panel }) => panel),
    time.root,
    ...charts.slice(2).map(({ root: panel }) => panel),
  );
  render(root, figures, tools, nothing, grid);
  await load();
  draw();
  return {
    refresh: () => load().then(draw),
    redraw: () => [time, ...charts].forEach((chart) => chart.draw()),
    destroy: () => [time, ...charts].forEach((chart) => chart.destroy()),
  };
}

function extent(loaded, axis) {
  if (axis === "time") return [0, Math.max(...loaded.map(({ run, steps }) => (steps.at.at(-1) ?? 1) - run.started))];
  return [1, Math.max(2, ...loaded.map(({ run }) => run.last_step ?? 1))];
}

const positions = ({ run, steps }, byTime) => (byTime ? steps.at.map((at) => at - run.started) : steps.step);

/** One run: all columns of the chart, each smoothed over its raw values. */
function single(loaded, { columns, evaluations, exact = [] }, { width, byTime }) {
  const { steps } = loaded;
  const x = positions(loaded, byTime);
  const lines = [];
  Object.entries(columns).forEach(([column, label], index) => {
    const values = steps.series[column];
    if (!values || (index > 0 && !values.mean.some((value) => value))) return; // such as the KL of a run without a reference
    const style = { label, colour: COLOURS[index], dash: index };
    const window = exact.includes(column) ? 1 : Math.ceil(width / steps.stride);
    if (window > 1) lines.push({ ...style, dash: 0, values: values.mean, quiet: true });
    lines.push({
      ...style,
      values: smooth(values.mean, window),
      ...(values.min && { low: values.min, high: values.max }),
    });
  });
  return evaluations ? withEvaluations(loaded, { x, lines }, byTime) : { x, lines };
}

function withEvaluations({ run, steps }, { x, lines }, byTime) {
  const found = EVALUATIONS.filter(([name]) => run.evaluations?.[name]?.some((value) => value !== null));
  const at = (step) => {
    if (!byTime) return step;
    const index = steps.step.findIndex((known) => known >= step);
    return index < 0 ? x.at(-1) : step ? x[index] : 0;
  };
  const places = found.length ? run.evaluations.step.map(at) : [];
  const [all, aligned] = align([
    ...lines.flatMap(({ values, low, high }) => [
      { x, y: values },
      { x, y: low ?? [] },
      { x, y: high ?? [] },
    ]),
    ...found.map(([name]) => ({ x: places, y: run.evaluations[name] })),
  ]);
  return {
    x: all,
    lines: [
      ...lines.map((line, index) => ({
        ...line,
        values: aligned[3 * index],
        ...(line.low && { low: aligned[3 * index + 1], high: aligned[3 * index + 2] }),
      })),
      ...found.map(([, label, colour], index) => ({
        label,
        colour,
        dash: index + 1,
        points: true,
        values: aligned[3 * lines.length + index],
      })),
    ],
  };
}

/** Several runs: the first column of each. */
function compared(loaded, { columns }, { width, byTime }) {
  const [column] = Object.keys(columns);
  const shown = loaded.filter(({ steps }) => steps.series[column]);
  const [x, values] = align(
    shown.map((entry) => ({
      x: positions(entry, byTime),
      y: smooth(entry.steps.series[column].mean, Math.ceil(width / entry.steps.stride)),
    })),
  );
  return {
    x,
    lines: shown.map(({ run, colour, dash }, index) => ({ label: run.name, colour, dash, values: values[index] })),
  };
}

/** The phases of a step, as running medians: a step that compiles or waits for a restart would hide the others. */
function phases(loaded, { width, byTime }) {
  const lines = PHASES.filter(([column]) => loaded.steps.series[column]?.mean.some((value) => value > 0)).map(
    ([column, label, colour]) => ({
      label,
      colour,
      values: medians(loaded.steps.series[column].mean, Math.ceil(width / loaded.steps.stride)),
    }),
  );
  return { x: positions(loaded, byTime), lines };
}

function showFigures(element, run) {
  const { latest = {}, evaluations } = run;
  const heldOut = evaluations?.sampled_heldout?.findLast((value) => value !== null);
  const elapsed = (run.ended ?? run.updated) - run.started;
  const facts = [
    ["Step", integer(run.last_step), run.total_steps ? `of ${integer(run.total_steps)}` : ""],
    ["Policy version", integer(run.version), ""],
    ["Reward", fixed(latest.reward), ""],
    ["Accuracy", percent(latest.accuracy, 1), ""],
    ["Held-out accuracy", percent(heldOut, 1), ""],
    ["Staleness", number(latest.staleness), "versions"],
    ["Tokens per second", integer(latest.tokens_per_second), ""],
    ["Step time", duration(latest.step_seconds), ""],
    ["Engines", integer(run.engines), ""],
    [run.state === "live" ? "Running for" : "Ran for", duration(elapsed), ""],
  ];
  render(
    element,
    facts.map(([name, value, rest]) =>
      h("div", {}, h("dt", {}, name), h("dd", {}, value, rest && h("small", {}, ` ${rest}`))),
    ),
  );
}

function showWaiting(element, run) {
  const isOver = run.state === "dead" || run.state === "finished";
  render(
    element,
    h("h2", {}, "This run has no steps yet"),
    h(
      "p",
      {},
      isOver
        ? "It ended before its first step was done. Its log files in the run directory say why."
        : "Engines start, programs compile, and the policy is warmed up first. Curves appear with the first step.",
    ),
    h("code", {}, run.path),
  );
}
