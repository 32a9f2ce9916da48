// How a version spreads over the fleet: one column per version, one row per engine, and the chosen version in milliseconds.

import * as address from "./address.js";
import { h, render, update } from "./dom.js";
import { clock, duration, integer, oneLine } from "./format.js";

const LEVELS = 4; // shades of delay

export class Spread {
  constructor(run, onChoose) {
    this.run = run;
    this.onChoose = onChoose;
    this.root = h("section.panel", { "aria-label": "Commits" });
  }

  show(commits, engines, chosen) {
    Object.assign(this, { commits, engines });
    const count = commits.version?.length;
    if (!count) {
      render(
        this.root,
        h("header", {}, h("h2", {}, "Commits")),
        h("div.body.muted", {}, "No version has been committed yet."),
      );
      return;
    }
    const index = Math.max(commits.version.indexOf(chosen), -1);
    this.draw(index < 0 ? count - 1 : index);
  }

  draw(chosen) {
    const { commits, engines } = this;
    const names = [...new Set([...engines, ...Object.keys(commits.engines)])];
    const delays = names.flatMap((name) => commits.engines[name] ?? []).filter((delay) => delay !== null);
    const longest = Math.max(...delays, 1e-6);
    const choose = (index) => {
      this.onChoose(index === commits.version.length - 1 ? null : commits.version[index]);
      this.draw(index);
    };
    const key = (event) => {
      const next = { ArrowLeft: chosen - 1, ArrowRight: chosen + 1, Home: 0, End: commits.version.length - 1 }[
        event.key
      ];
      if (next === undefined) return;
      event.preventDefault();
      choose(Math.min(commits.version.length - 1, Math.max(0, next)));
    };
    const cell = (name, index) => {
      const delay = commits.engines[name]?.[index] ?? null;
      const level = delay === null ? "missing" : `l${Math.min(LEVELS - 1, Math.floor((LEVELS * delay) / longest))}`;
      const text = `version ${commits.version[index]} on ${oneLine(name)}: ${delay === null ? "not committed" : `after ${duration(delay)}`}`;
      return h(`i.cell.${level}`, { title: text, "data-chosen": index === chosen, onclick: () => choose(index) });
    };
    const matrix = h(
      "div.matrix",
      {
        tabindex: 0,
        role: "slider",
        "aria-label": "Committed version",
        "aria-valuemin": commits.version[0],
        "aria-valuemax": commits.version.at(-1),
        "aria-valuenow": commits.version[chosen],
        "aria-valuetext": this.describe(names, chosen),
        onkeydown: key,
      },
      names.map((name) =>
        h(
          "div.row",
          {},
          h("span.name", { title: oneLine(name) }, h("bdi", {}, oneLine(name, 24))),
          h(
            "span.cells",
            {},
            commits.version.map((_, index) => cell(name, index)),
          ),
        ),
      ),
    );
    update(
      this.root,
      h(
        "header",
        {},
        h("h2", {}, "Commits over the fleet"),
        h(
          "span.muted",
          {},
          `versions ${integer(commits.version[0])} to ${integer(commits.version.at(-1))}; delay after the first engine`,
        ),
        h(
          "ul.legend.end",
          {},
          [
            ["l0", "0"],
            [`l${LEVELS - 1}`, duration(longest)],
            ["missing", "not committed"],
          ].map(([level, text]) => h("li", {}, h(`i.cell.${level}`), text)),
        ),
      ),
      h("div.body.spread", {}, matrix, this.version(names, chosen)),
    );
  }

  /** The chosen version: when each engine served it. */
  version(names, index) {
    const { commits } = this;
    const delays = names.map((name) => commits.engines[name]?.[index] ?? null);
    const last = Math.max(...delays.filter((delay) => delay !== null), 1e-6);
    return h(
      "div",
      {},
      h(
        "h3",
        {},
        `Version ${integer(commits.version[index])} at ${clock(commits.first[index])}`,
        " ",
        h(
          "a",
          {
            href: address.href("timeline", {
              sync: commits.version[index],
              from: (commits.first[index] - 0.05).toFixed(6),
              to: (commits.first[index] + last + 0.05).toFixed(6),
            }),
          },
          "in the timeline",
        ),
      ),
      h(
        "div.race",
        {},
        names.map((name, row) => [
          h("span.name", { title: oneLine(name) }, h("bdi", {}, oneLine(name, 24))),
          h("span.track", {}, delays[row] !== null && h("i", { style: { left: `${(100 * delays[row]) / last}%` } })),
          h(
            "span.number",
            {},
            delays[row] === null ? "not committed" : delays[row] === 0 ? "first" : `+ ${duration(delays[row])}`,
          ),
        ]),
      ),
    );
  }

  describe(names, index) {
    const delays = names.map((name) => this.commits.engines[name]?.[index] ?? null).filter((delay) => delay !== null);
    return `version ${this.commits.version[index]}, on ${delays.length} of ${names.length} engines within ${duration(Math.max(...delays, 0))}`;
  }
}
