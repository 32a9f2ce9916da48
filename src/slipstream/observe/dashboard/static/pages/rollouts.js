// All rollouts of every step: a list to filter and sort, and beside it one completion with its tokens.

import * as address from "../address.js";
import { latest } from "../api.js";
import { announce, debounce, h, render, update } from "../dom.js";
import { fixed, integer, number, oneLine, plural } from "../format.js";
import { SampleView } from "../sample.js";

export const title = "Rollouts";

const PAGE = 50;
const FILTERS = [
  "from",
  "to",
  "min_reward",
  "max_reward",
  "min_length",
  "max_length",
  "min_staleness",
  "max_staleness",
  "finish",
  "engine",
  "text",
  "zero_variance",
  "used",
];
const SORTS = {
  step: "Step",
  reward: "Reward",
  reward_std: "Spread",
  length: "Length",
  staleness: "Stale",
  gap: "Gap",
  advantage: "Advantage",
  engine: "Engine",
};

export async function mount(root, { run }) {
  const load = latest();
  const form = h("form.panel.filters", { "aria-label": "Filters", onsubmit: (event) => event.preventDefault() });
  const list = h("section.panel.list", { "aria-label": "Rollouts" });
  const sample = new SampleView(run, open);
  const view = () => (address.get("view") === "samples" ? "samples" : "groups");

  function open(row, { focus = false } = {}) {
    address.change({ row, token: null });
    mark();
    return sample.show(row, { focus });
  }

  function mark() {
    const row = address.get("row");
    for (const line of list.querySelectorAll("tbody tr"))
      line.toggleAttribute("data-open", line.dataset.id === row || row.startsWith(`${line.dataset.id}.`));
  }

  async function show() {
    const query = Object.fromEntries(FILTERS.map((name) => [name, address.get(name)]));
    const offset = address.number("offset") ?? 0;
    const sort = address.get("sort") || "step";
    const order = address.get("order") || "desc";
    try {
      const found = await load(`runs/${run.id}/rollouts`, { view: view(), ...query, sort, order, limit: PAGE, offset });
      showEngines(form, found.engines);
      update(
        list,
        summary(found, query),
        table(found, { view: view(), sort, order, onSort, open }),
        pager(found.total, offset, onPage),
      );
      mark();
      return found;
    } catch (error) {
      if (error.name === "AbortError") return null;
      render(list, h("p.notice.warn", { role: "alert" }, error.message));
      return null;
    }
  }

  function onSort(column, order) {
    address.change({ sort: column, order, offset: null });
    show().then(() => list.querySelector(`[data-sort="${column}"]`)?.focus());
  }

  function onPage(offset) {
    address.change({ offset: offset || null });
    show().then(() => list.querySelector("tbody a")?.focus());
  }

  const filtered = debounce(() => show().then((found) => found && announce(`${found.total} found`)), 200);
  buildFilters(form, run, (changes) => {
    address.change({ ...changes, offset: null });
    filtered();
  });
  root.classList.add("rollouts");
  render(root, form, list, sample.root);
  const found = await show();
  const row = address.get("row") || found?.rows?.id?.[0];
  if (row) await sample.show(row);
  if (!address.get("row") && row) {
    address.change({ row });
    mark();
  }
  // In the whole page: [ and ] open the previous and the next completion.
  const keys = (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea")) return;
    const next = { "[": sample.previous, "]": sample.next }[event.key];
    if (next) open(next);
  };
  document.addEventListener("keydown", keys);
  return {
    // The list follows a live run while it shows the last step; a step that was asked for stays as it is.
    refresh: () =>
      address.get("to") || address.number("offset")
        ? null
        : show().then((news) => {
            if (!address.get("row") && news?.rows.id.length) return open(news.rows.id[0]);
          }),
    destroy: () => {
      document.removeEventListener("keydown", keys);
      sample.destroy();
    },
  };
}

function buildFilters(form, run, change) {
  const input = (name, label, attributes = {}) =>
    h(
      "label.field",
      {},
      label,
      h("input", {
        name,
        value: address.get(name),
        oninput: (event) => change({ [name]: event.target.value }),
        ...attributes,
      }),
    );
  const range = (name, label, attributes) =>
    h(
      "fieldset.range",
      {},
      h("legend", {}, label),
      ["min_", "max_"].map((side) =>
        h("input", {
          name: side + name,
          type: "number",
          value: address.get(side + name),
          placeholder: side === "min_" ? "min" : "max",
          "aria-label": `${side === "min_" ? "Least" : "Greatest"} ${label.toLowerCase()}`,
          oninput: (event) => change({ [side + name]: event.target.value }),
          ...attributes,
        }),
      ),
    );
  const choice = (name, label, options) =>
    h(
      "label.field",
      {},
      label,
      h(
        "select",
        { name, onchange: (event) => change({ [name]: event.target.value }) },
        options.map(([value, text]) => h("option", { value, selected: address.get(name) === value }, text)),
      ),
    );
  const step = (name) =>
    h("input", {
      name,
      type: "number",
      min: 1,
      value: address.get(name),
      placeholder: name === "from" ? "first" : "last",
      "aria-label": name === "from" ? "First step" : "Last step",
      oninput: () => {
        const [from, to] = ["from", "to"].map((side) => form.elements[side].value);
        change({ from: from || (to && "1"), to: to || (from && String(run.last_step)) });
      },
    });
  const kept = run.rollout_steps ?? [1, run.last_step];
  const all = () => {
    [form.elements.from.value, form.elements.to.value] = [kept[0], ""];
    change({ from: kept[0], to: 1e6 + kept[0] - 1 });
  };
  const clear = () => {
    for (const element of form.elements) if (element.name && element.name !== "view") element.value = "";
    change(Object.fromEntries(FILTERS.map((name) => [name, null])));
  };
  const views = h(
    "div.segments",
    { role: "group", "aria-label": "Rows" },
    [
      ["groups", "Groups"],
      ["samples", "Completions"],
    ].map(([name, text]) =>
      h(
        "button",
        {
          type: "button",
          "aria-pressed": String((address.get("view") || "groups") === name),
          onclick: (event) => {
            for (const button of event.target.parentElement.children)
              button.setAttribute("aria-pressed", String(button === event.target));
            change({ view: name === "groups" ? null : name, sort: null, order: null });
          },
        },
        text,
      ),
    ),
  );
  render(
    form,
    views,
    h(
      "fieldset.range",
      {},
      h("legend", {}, "Steps"),
      step("from"),
      step("to"),
      h("button", { type: "button", onclick: all, title: "Search all recorded steps" }, "All"),
    ),
    range("reward", "Reward", { step: "any" }),
    range("length", "Length", { min: 0 }),
    range("staleness", "Staleness", { min: 0 }),
    choice("finish", "Finished by", [
      ["", "any"],
      ["stop", "stop"],
      ["length", "length limit"],
    ]),
    choice("engine", "Engine", [["", "any"]]),
    choice("zero_variance", "Group", [
      ["", "any"],
      ["true", "zero variance"],
      ["false", "with signal"],
    ]),
    choice("used", "Trained on", [
      ["", "any"],
      ["true", "yes"],
      ["false", "no"],
    ]),
    input("text", "Text", { type: "search", maxlength: 200, placeholder: "in prompt or completion" }),
    h("button", { type: "button", onclick: clear }, "Clear"),
  );
}

/** The engines that the run has seen, in their select. */
function showEngines(form, engines = []) {
  const select = form.elements.engine;
  const names = ["", ...engines];
  const wanted = address.get("engine");
  if (wanted && !names.includes(wanted)) names.push(wanted);
  if ([...select.options].map(({ value }) => value).join() === names.join()) return;
  render(
    select,
    names.map((name) => h("option", { value: name, selected: name === wanted }, name || "any")),
  );
}

function summary({ view, total, total_is_exact: isExact, scanned, from, to }, query) {
  const word = view === "samples" ? "completion" : "group";
  const where =
    from === to ? `step ${integer(to)}` : `steps ${integer(from)} to ${integer(Math.max(from, scanned?.to ?? to))}`;
  const isLatest = !query.to;
  return h(
    "header",
    {},
    h("h2", { "aria-live": "polite" }, `${isExact === false ? "at least " : ""}${plural(total, word)}`),
    h("span.muted", {}, `of ${where}${isLatest ? ", the latest" : ""}`),
    scanned?.complete === false &&
      h("span.muted", {}, `searched down to step ${integer(scanned.from)}; narrow the steps to see more`),
  );
}

function table({ view, rows, total, to }, { sort, order, onSort, open }) {
  if (!total && !to)
    return h(
      "div.empty",
      {},
      h("h2", {}, "This run has no rollouts yet"),
      h("p", {}, "They appear with the first step, if the run records completions."),
    );
  if (!total)
    return h(
      "div.empty",
      {},
      h("h2", {}, "Nothing found"),
      h("p", {}, "No rollout matches these filters in these steps. Clear a filter, or choose All steps."),
    );
  const isGroups = view !== "samples";
  const columns = isGroups
    ? ["step", null, "reward", "reward_std", "length", "staleness", "gap", "engine"]
    : ["step", null, "reward", "advantage", "length", "staleness", "gap", "engine"];
  const head = columns.map((column) => {
    if (!column) return h("th", { scope: "col" }, isGroups ? "Prompt" : "Completion");
    const isSorted = column === sort;
    const next = isSorted && order === "desc" ? "asc" : "desc";
    return h(
      `th${column !== "engine" ? ".number" : ""}`,
      { scope: "col", "aria-sort": isSorted && (order === "asc" ? "ascending" : "descending") },
      h("button", { type: "button", "data-sort": column, onclick: () => onSort(column, next) }, SORTS[column]),
    );
  });
  const lowest = Math.min(
    0,
    ...rows.reward.filter(Number.isFinite),
    ...(rows.reward_min ?? []).filter(Number.isFinite),
  );
  const highest = Math.max(
    1,
    ...rows.reward.filter(Number.isFinite),
    ...(rows.reward_max ?? []).filter(Number.isFinite),
  );
  const body = rows.id.map((id, index) => {
    const name = isGroups
      ? `${rows.step[index]}.${rows.group[index]}`
      : `${rows.step[index]}.${rows.group[index]}.${rows.sample[index]}`;
    const marks = [
      rows.zero_variance?.[index] && [
        "flat",
        "zero variance",
        "All completions of the group have the same reward: nothing to learn",
      ],
      rows.used && !rows.used[index] && ["left out", "not trained on", "Left out of the update"],
      !isGroups && rows.finish[index] === "length" && ["cut off", "cut off", "Ended by the length limit"],
    ].filter(Boolean);
    return h(
      "tr",
      { "data-id": id, onclick: (event) => !event.target.closest("a") && open(id) },
      h(
        "td.number",
        {},
        h(
          "a",
          {
            href: address.href("rollouts", { row: id }),
            onclick: (event) => follow(event, id, open),
            onkeydown: (event) => walk(event),
          },
          name,
        ),
      ),
      h(
        "td.text",
        {},
        h("bdi", {}, oneLine(isGroups ? rows.prompt[index] : rows.text[index], 90) || h("span.muted", {}, "(empty)")),
        marks.map(([, text, hint]) => [" ", h("span.pill.plain", { title: hint }, text)]),
      ),
      h("td.number", {}, fixed(rows.reward[index], 2), isGroups && strip(rows.rewards?.[index] ?? [], lowest, highest)),
      h("td.number", {}, isGroups ? fixed(rows.reward_std[index], 2) : fixed(rows.advantage?.[index], 2)),
      h("td.number", {}, isGroups ? fixed(rows.length[index], 1) : integer(rows.length[index])),
      h("td.number", {}, number(rows.staleness[index])),
      h("td.number", {}, number(rows.gap?.[index], 2)),
      h("td.engine", {}, h("bdi", {}, visibleEngines(rows.engine[index]))),
    );
  });
  return h(
    "div.scroll",
    { tabindex: 0, role: "region", "aria-label": "List of rollouts" },
    h("table", {}, h("thead", {}, h("tr", {}, head)), h("tbody", {}, body)),
  );
}

function visibleEngines(names) {
  const all = (names ?? "").split(",").filter(Boolean);
  return all.length > 1 ? `${oneLine(all[0])} + ${all.length - 1}` : oneLine(all[0] ?? "");
}

function follow(event, id, open) {
  if (event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  open(id, { focus: true });
}

/** Up and down arrows move from row to row. */
function walk(event) {
  const step = { ArrowDown: "nextElementSibling", ArrowUp: "previousElementSibling" }[event.key];
  if (!step) return;
  event.preventDefault();
  event.target.closest("tr")[step]?.querySelector("a").focus();
}

/** The rewards of a group's completions as bars. */
function strip(rewards, lowest, highest) {
  return h(
    "span.strip",
    { "aria-hidden": "true", title: rewards.map((reward) => fixed(reward, 2)).join("  ") },
    rewards
      .slice(0, 16)
      .map((reward) =>
        h("i", { style: { height: `${Math.max(8, (100 * ((reward ?? lowest) - lowest)) / (highest - lowest))}%` } }),
      ),
  );
}

function pager(total, offset, onPage) {
  if (total <= PAGE) return null;
  return h(
    "nav.tools.pager",
    { "aria-label": "Pages of the list" },
    h("button", { disabled: offset === 0, onclick: () => onPage(Math.max(0, offset - PAGE)) }, "Previous"),
    h("span", {}, `${integer(offset + 1)} to ${integer(Math.min(total, offset + PAGE))} of ${integer(total)}`),
    h("button", { disabled: offset + PAGE >= total, onclick: () => onPage(offset + PAGE) }, "Next"),
  );
}
