// The tokens of a completion, coloured by what is known about them. The first ones are drawn at once, the others while the
// browser is idle; what is out of sight is not laid out.

import { announce, h, render } from "./dom.js";
import { fixed, integer, number, percent, signed, visible } from "./format.js";

export const COLOURINGS = { version: "Policy version", gap: "Logprob gap", advantage: "Advantage", none: "Plain" };

const FIRST = 600; // tokens drawn before anything else happens
const CHUNK = 400; // tokens per block; a block ends at a line feed where there is one
const VERSION_STYLES = 6;
const GAPS = [0.05, 0.2, 1]; // nats
const ADVANTAGES = [0.01, 0.5, 1.5];

/** The facts of token `index`, from the columns of the API. */
export function factsOf(sample, index) {
  const { tokens } = sample;
  const at = (column) => (Array.isArray(column) ? column[index] : column) ?? null;
  const engine = at(tokens.engine_logprob);
  const trainer = at(tokens.trainer_logprob);
  return {
    position: sample.from + index,
    id: at(tokens.id),
    piece: at(tokens.piece) ?? "",
    version:
      tokens.version.find(([, start, stop]) => sample.from + index >= start && sample.from + index < stop)?.[0] ?? null,
    engine,
    raw: at(tokens.raw_logprob) ?? engine,
    trainer,
    gap: engine === null || trainer === null ? null : trainer - engine,
    advantage: at(tokens.advantage),
    isTrained: at(tokens.mask) !== 0,
  };
}

/** p3 … p1, "" and n1 … n3: how far a value is above or below zero. */
function strength(value, limits) {
  if (value === null || !Number.isFinite(value)) return "";
  const level = limits.filter((limit) => Math.abs(value) >= limit).length;
  return level ? `${value > 0 ? "p" : "n"}${level}` : "";
}

export class TokenView {
  /** `onSelect(index)` is told which token was chosen by click or keyboard. */
  constructor({ onSelect = () => {} } = {}) {
    this.onSelect = onSelect;
    this.text = h("div.tokens", {
      tabindex: 0,
      role: "group",
      onkeydown: (event) => this.key(event),
      onmouseover: (event) => this.hover(event),
      onmouseleave: () => (this.tip.hidden = true),
      onclick: (event) => this.click(event),
    });
    this.tip = h("dl.facts.tip", { role: "tooltip", hidden: true });
    this.legend = h("ul.legend");
    this.root = h("div.token-view", {}, this.legend, this.text, this.tip);
  }

  show(sample, colouring, selected = null) {
    this.sample = sample;
    this.colouring = colouring;
    this.elements = [];
    this.active = null;
    this.run = (this.run ?? 0) + 1; // ends the drawing of an earlier sample
    this.tip.hidden = true;
    this.text.setAttribute(
      "aria-label",
      `Completion, ${integer(sample.count)} tokens, coloured by ${COLOURINGS[colouring].toLowerCase()}. Left and right arrow keys move from token to token.`,
    );
    render(this.legend, legendOf(sample, colouring));
    render(this.text);
    const count = sample.tokens.id.length;
    if (!count) return void render(this.text, h("span.muted", {}, "(no tokens)"));
    const upTo = selected === null ? 0 : selected - sample.from + 1;
    while (this.elements.length < Math.min(count, Math.max(FIRST, upTo))) this.block();
    if (selected !== null) this.select(selected - sample.from, { quiet: true });
    this.continue(this.run);
  }

  /** `sample` has more tokens than the one that is shown. */
  extend(sample) {
    this.sample = sample;
    this.continue(this.run);
  }

  continue(run) {
    if (run !== this.run || this.elements.length >= this.sample.tokens.id.length) return;
    const later = globalThis.requestIdleCallback ?? ((work) => setTimeout(work, 1));
    later((deadline) => {
      do {
        if (run !== this.run || this.elements.length >= this.sample.tokens.id.length) return;
        this.block();
      } while ((deadline?.timeRemaining?.() ?? 0) > 4);
      this.continue(run);
    });
  }

  /** Draw the next block of tokens. */
  block() {
    const { piece } = this.sample.tokens;
    const start = this.elements.length;
    let stop = start;
    while (stop < piece.length && stop - start < 3 * CHUNK && (stop - start < CHUNK || !piece[stop - 1].endsWith("\n")))
      stop += 1;
    const block = h("div.block");
    for (let index = start; index < stop; index += 1) {
      const element = document.createElement("span");
      element.textContent = visible(piece[index]).replaceAll("\n", "↵\n");
      element.token = index;
      this.style(element, index);
      this.elements.push(element);
      block.append(element);
    }
    this.text.append(block);
  }

  style(element, index) {
    const facts = factsOf(this.sample, index);
    const classes = [];
    if (this.colouring === "version" && facts.version !== null) {
      classes.push(`v${this.styleOf(facts.version)}`);
      if (this.sample.tokens.version.some(([, start]) => start === facts.position) || index === 0)
        element.dataset.version = facts.version;
    }
    if (this.colouring === "gap") classes.push(strength(facts.gap, GAPS));
    if (this.colouring === "advantage") classes.push(strength(facts.advantage, ADVANTAGES));
    if (!facts.isTrained) classes.push("untrained");
    element.className = classes.join(" ");
  }

  styleOf(version) {
    return [...new Set(this.sample.tokens.version.map(([known]) => known))].indexOf(version) % VERSION_STYLES;
  }

  hover(event) {
    const index = event.target.token;
    if (index === undefined) this.tip.hidden = true;
    else this.tell(index);
  }

  click(event) {
    if (event.target.token !== undefined) this.select(event.target.token);
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || !this.elements.length) return;
    const last = this.sample.tokens.id.length - 1;
    const from = this.active ?? -1;
    const target = {
      ArrowRight: from + 1,
      ArrowLeft: from - 1,
      Home: 0,
      End: last,
      PageDown: from + 100,
      PageUp: from - 100,
    }[event.key];
    if (event.key === "Escape") this.tip.hidden = true;
    if (target === undefined) return;
    event.preventDefault();
    this.select(Math.min(last, Math.max(0, target)));
  }

  select(index, { quiet = false } = {}) {
    while (this.elements.length <= index && this.elements.length < this.sample.tokens.id.length) this.block();
    if (this.active !== null) this.elements[this.active].classList.remove("active");
    const element = this.elements[index];
    if (!element) return;
    this.active = index;
    element.classList.add("active");
    element.scrollIntoView({ block: "nearest" });
    this.tell(index);
    if (quiet) return;
    const facts = factsOf(this.sample, index);
    announce(`Token ${facts.position}, ${visible(facts.piece)}, version ${facts.version}, gap ${signed(facts.gap)}`);
    this.onSelect(facts.position);
  }

  tell(index) {
    const facts = factsOf(this.sample, index);
    const probability = (value) => (value === null ? "–" : `${fixed(value, 4)} (${percent(Math.exp(value), 2)})`);
    const rows = [
      ["Token", [h("code", {}, JSON.stringify(visible(facts.piece))), ` id ${facts.id ?? "–"}`]],
      ["Position", `${integer(facts.position)} of ${integer(this.sample.count)}`],
      ["Version", facts.version ?? "–"],
      ["Engine logprob", probability(facts.engine)],
      facts.raw !== facts.engine && ["… of the model itself", probability(facts.raw)],
      ["Trainer logprob", probability(facts.trainer)],
      [
        "Trainer − engine",
        facts.gap === null ? "–" : `${signed(facts.gap, 4)} nats, ratio ${number(Math.exp(facts.gap))}`,
      ],
      ["Advantage", signed(facts.advantage)],
      ["Trained on", facts.isTrained ? "yes" : "no"],
    ];
    render(
      this.tip,
      rows.filter(Boolean).map(([name, value]) => [h("dt", {}, name), h("dd", {}, h("bdi", {}, value))]),
    );
    this.tip.hidden = false;
    const box = this.elements[index].getClientRects()[0] ?? this.text.getBoundingClientRect();
    const width = this.tip.offsetWidth;
    const height = this.tip.offsetHeight;
    const top = box.bottom + 6 + height > innerHeight ? box.top - height - 6 : box.bottom + 6;
    this.tip.style.left = `${Math.max(8, Math.min(box.left, innerWidth - width - 8))}px`;
    this.tip.style.top = `${Math.max(8, top)}px`;
  }
}

function legendOf(sample, colouring) {
  const entry = (style, text) =>
    h("li", {}, h(`span.swatch.${style || "zero"}`, { "aria-hidden": "true" }, "ab"), text);
  const untrained = Array.isArray(sample.tokens.mask) && entry("untrained", "not trained on");
  if (colouring === "version") {
    const versions = [...new Set(sample.tokens.version.map(([version]) => version))];
    return [
      versions.slice(0, 12).map((version, index) => entry(`v${index % VERSION_STYLES}`, `version ${version}`)),
      versions.length > 12 && h("li", {}, `and ${versions.length - 12} more`),
      untrained,
    ];
  }
  if (colouring === "gap") {
    if (sample.tokens.trainer_logprob === null)
      return h("li", {}, "The trainer's logprobs of this completion were not recorded.");
    return [
      entry("n3", "trainer lower by 1 nat"),
      entry("n2", "0.2"),
      entry("n1", "0.05"),
      entry("", "equal"),
      entry("p1", "0.05"),
      entry("p2", "0.2"),
      entry("p3", "higher by 1 nat"),
      untrained,
    ];
  }
  if (colouring === "advantage") {
    return [
      entry("n3", "below −1.5"),
      entry("n2", "−0.5"),
      entry("n1", "negative"),
      entry("", "none"),
      entry("p1", "positive"),
      entry("p2", "0.5"),
      entry("p3", "above 1.5"),
      untrained,
    ];
  }
  return untrained;
}
