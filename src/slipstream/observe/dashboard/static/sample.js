// One completion: its group, its facts, its prompt and its tokens.

import * as address from "./address.js";
import { latest } from "./api.js";
import { h, render } from "./dom.js";
import { fixed, integer, number, oneLine, signed, visible } from "./format.js";
import { COLOURINGS, TokenView } from "./tokens.js";

const FIRST = 1200; // tokens loaded and shown before the others are asked for

export class SampleView {
  /** `open(row)` shows another completion. */
  constructor(run, open) {
    this.run = run;
    this.open = open;
    this.load = latest();
    this.loadGroup = latest();
    this.previous = this.next = null;
    this.tokens = new TokenView({ onSelect: (position) => address.change({ token: position }) });
    this.root = h(
      "section.panel.sample",
      { "aria-label": "Completion", tabindex: -1 },
      h("div.empty", {}, h("p", {}, "Choose a group to see its completions, token by token.")),
    );
  }

  /** `row` is the id of a completion, or of a group, whose first completion is shown. */
  async show(row, { focus = false } = {}) {
    const [step, group, sample = "0"] = row.split(".");
    const path = `runs/${this.run.id}/rollouts/${step}.${group}.${sample}`;
    const isFar = (address.number("token") ?? 0) >= FIRST; // the chosen token needs all before it
    try {
      const [found, whole] = await Promise.all([
        this.load(path, isFar ? {} : { to: FIRST }),
        this.loadGroup(`runs/${this.run.id}/rollouts/${step}.${group}`),
      ]);
      Object.assign(this, { sample: found, previous: found.previous, next: found.next });
      this.draw(whole);
      if (focus) this.root.focus();
      if (!isFar && found.to < found.count) this.showRest(path);
    } catch (error) {
      if (error.name === "AbortError") return;
      render(
        this.root,
        h("div.empty", { role: "alert" }, h("h2", {}, "This completion cannot be shown"), h("p", {}, error.message)),
      );
    }
  }

  async showRest(path) {
    try {
      this.sample = await this.load(path);
      this.tokens.extend(this.sample);
    } catch (error) {
      if (error.name === "AbortError") return;
      this.tokens.root.append(h("p.notice.warn", { role: "alert" }, `The other tokens are missing: ${error.message}`));
    }
  }

  colouring() {
    const name = address.get("colour");
    return name in COLOURINGS ? name : "version";
  }

  draw(group) {
    const { sample } = this;
    const move = (target, text, key) =>
      h("button", { disabled: !target, onclick: () => this.open(target), title: `Key ${key}` }, text);
    const colours = h(
      "div.segments",
      { role: "group", "aria-label": "Colour tokens by" },
      Object.entries(COLOURINGS).map(([name, text]) =>
        h(
          "button",
          {
            "data-colour": name,
            "aria-pressed": String(name === this.colouring()),
            onclick: () => this.recolour(name),
          },
          text,
        ),
      ),
    );
    this.colours = colours;
    render(
      this.root,
      h(
        "header",
        {},
        h("h2", {}, `Step ${integer(sample.step)}, group ${sample.group}, completion ${sample.sample}`),
        sample.zero_variance &&
          h(
            "span.pill.plain",
            { title: "All completions of the group have the same reward: nothing to learn" },
            "zero variance",
          ),
        !sample.used && h("span.pill.plain", {}, "not trained on"),
        h("span.end", {}, move(sample.previous, "Previous", "["), " ", move(sample.next, "Next", "]")),
      ),
      h(
        "div.body.stack",
        {},
        this.siblings(group),
        facts(sample),
        h(
          "details",
          { open: sample.prompt.text.length < 600 },
          h("summary", {}, `Prompt, ${integer(sample.prompt.tokens)} tokens`),
          h("pre.prompt", { tabindex: 0, role: "region", "aria-label": "Prompt" }, visible(sample.prompt.text)),
        ),
        h("div.tools", {}, h("h3", {}, `Completion, ${integer(sample.count)} tokens`), h("span.end", {}, colours)),
        this.tokens.root,
      ),
    );
    this.tokens.show(sample, this.colouring(), address.number("token"));
  }

  recolour(name) {
    address.change({ colour: name === "version" ? null : name });
    for (const button of this.colours.children)
      button.setAttribute("aria-pressed", String(button.dataset.colour === name));
    this.tokens.show(this.sample, name, address.number("token"));
  }

  siblings({ samples: rows }) {
    if (!rows || rows.id.length < 2) return null;
    return h(
      "div.scroll.siblings",
      { tabindex: 0, role: "region", "aria-label": "Completions of the group" },
      h(
        "table",
        {},
        h(
          "thead",
          {},
          h(
            "tr",
            {},
            ["#", "Reward", "Advantage", "Length", "Stale", "Text"].map((name, index) =>
              h(`th${index < 5 ? ".number" : ""}`, { scope: "col" }, name),
            ),
          ),
        ),
        h(
          "tbody",
          {},
          rows.id.map((id, index) =>
            h(
              "tr",
              { "data-open": id === this.sample.id, onclick: () => this.open(id) },
              h(
                "td.number",
                {},
                h(
                  "button.link",
                  {
                    "aria-current": id === this.sample.id && "true",
                    onclick: (event) => {
                      event.stopPropagation();
                      this.open(id);
                    },
                  },
                  rows.sample[index],
                ),
              ),
              h("td.number", {}, fixed(rows.reward[index], 2)),
              h("td.number", {}, signed(rows.advantage[index], 2)),
              h(
                "td.number",
                {},
                integer(rows.length[index]),
                rows.finish[index] === "length" && h("span", { title: "Ended by the length limit" }, " ✂"),
              ),
              h("td.number", {}, number(rows.staleness[index])),
              h("td.text", {}, h("bdi", {}, oneLine(rows.text[index], 60) || "(empty)")),
            ),
          ),
        ),
      ),
    );
  }

  destroy() {
    this.tokens.run = null;
  }
}

function facts(sample) {
  const versions = sample.tokens.version.map(([version]) => version);
  const parts = Object.entries(sample.reward_parts ?? {})
    .map(([name, value]) => `${name} ${fixed(value, 2)}`)
    .join(", ");
  const rows = [
    ["Reward", `${fixed(sample.reward, 3)}${parts && ` (${parts})`}`],
    ["Finished by", sample.finish === "length" ? "length limit" : sample.finish],
    ["Engine", oneLine(sample.engine)],
    [
      "Policy versions",
      versions.length > 1 ? `${Math.min(...versions)} to ${Math.max(...versions)}` : (versions[0] ?? "–"),
    ],
    ["Staleness", `${number(sample.staleness)} behind version ${sample.trained_version ?? "–"} of the trainer`],
  ];
  return h(
    "dl.facts",
    {},
    rows.map(([name, value]) => [h("dt", {}, name), h("dd", {}, h("bdi", {}, value))]),
  );
}
