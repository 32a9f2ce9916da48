// A canvas with one lane per process and the spans of each, zoomed and moved by mouse, touch and keyboard.

import { colour } from "./chart.js";
import { h } from "./dom.js";
import { duration, oneLine } from "./format.js";

const AXIS = 26;
const ROW = 20;
const GAP = 8; // below a lane
const NAMES = 13; // above a lane, for the names of its events
const SHORTEST = 1e-4; // seconds that fill the canvas at the strongest zoom
const STEPS = [1, 2, 5];

const SPAN_COLOURS = {
  generate: "blue",
  train: "orange",
  sync: "green",
  update: "green",
  stage: "sky",
  send: "sky",
  receive: "sky",
  verify: "sky",
  commit: "purple",
  load: "purple",
  reward: "purple",
  pause: "vermillion",
  paused: "vermillion",
  rollback: "vermillion",
  sleep: "brown",
  asleep: "brown",
  wake: "brown",
  evaluate: "brown",
  save: "brown",
  diagnose: "brown",
  score: "sky",
  canary: "sky",
};

const NO_SPANS = { lane: [], name: [], start: [], end: [], depth: [], step: [], version: [], count: [], detail: [] };

export const FAULTS = ["lost", "quarantine", "fault", "rollback", "stale", "suspect", "slow", "retry"];

/** Put overlapping spans of a lane into rows: the first row, from the span's depth on, that is free. */
export function rowsOf(spans) {
  const order = spans.start
    .map((_, index) => index)
    .sort((a, b) => spans.start[a] - spans.start[b] || spans.end[b] - spans.end[a]);
  const ends = new Map(); // lane: the end of the last span in each row
  const rows = new Array(order.length);
  for (const index of order) {
    const lane = ends.get(spans.lane[index]) ?? ends.set(spans.lane[index], []).get(spans.lane[index]);
    let row = spans.depth[index] ?? 0;
    while ((lane[row] ?? -Infinity) > spans.start[index] + 1e-9) row += 1;
    lane[row] = spans.end[index];
    rows[index] = row;
  }
  return rows;
}

/** Places of round numbers between `from` and `to`, about `count` of them, and their distance. */
export function ticks(from, to, count) {
  const rough = (to - from) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * (STEPS.find((factor) => factor * power >= rough) ?? 10);
  const first = Math.ceil(from / step);
  return {
    step,
    at: Array.from({ length: Math.max(0, Math.floor(to / step) - first + 1) }, (_, index) => (first + index) * step),
  };
}

export class Lanes {
  /** `onMove()` is called when another part comes into view, `onSelect(index)` with the index of a span, or null. */
  constructor({ onMove, onSelect }) {
    Object.assign(this, { onMove, onSelect, data: null, selected: null, hovered: null, laneRows: [] });
    this.canvas = h("canvas", {
      tabindex: 0,
      role: "application",
      "aria-roledescription": "timeline",
      onkeydown: (event) => this.key(event),
      onpointerdown: (event) => this.press(event),
      onpointermove: (event) => this.move(event),
      onpointerup: (event) => this.release(event),
      onpointerleave: () => this.hover(null),
      onpointercancel: () => (this.drag = null),
      ondblclick: (event) => this.zoom(0.25, this.timeAt(event.offsetX)),
    });
    this.canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    this.tip = h("div.tip", { hidden: true, "aria-hidden": "true" });
    this.root = h("div.lanes", {}, this.canvas, this.tip);
    this.observer = new ResizeObserver(() => this.draw());
    this.observer.observe(this.root);
  }

  /** The part in view: seconds after `begin`. */
  view(from, to) {
    const middle = (from + to) / 2;
    const width = Math.min(Math.max(to - from, SHORTEST), this.limits[1] - this.limits[0]);
    const start = Math.min(Math.max(middle - width / 2, this.limits[0]), this.limits[1] - width);
    [this.from, this.to] = [start, start + width];
    this.draw();
  }

  show(data, begin, limits) {
    data.spans = { ...NO_SPANS, ...data.spans };
    if (this.data?.lanes.join() !== data.lanes.join()) this.laneRows = [];
    const before = this.selected !== null && this.data ? this.keyOf(this.selected) : null;
    Object.assign(this, { data, begin, limits, rows: rowsOf(data.spans), hovered: null });
    data.lanes.forEach((_, lane) => (this.laneRows[lane] ??= 1));
    this.rows.forEach(
      (row, index) =>
        (this.laneRows[data.spans.lane[index]] = Math.max(this.laneRows[data.spans.lane[index]], row + 1)),
    );
    this.selected = null;
    if (before !== null)
      data.spans.start.some((_, index) => this.keyOf(index) === before && ((this.selected = index), true));
    this.order = data.spans.start.map((_, index) => index).sort((a, b) => data.spans.start[a] - data.spans.start[b]);
    this.draw();
  }

  keyOf(index) {
    const { spans, lanes } = this.data;
    return `${lanes[spans.lane[index]]} ${spans.name[index]} ${spans.start[index]}`;
  }

  get gutter() {
    return this.root.clientWidth < 560 ? 74 : 118;
  }

  x(time) {
    return this.gutter + ((time - this.from) / (this.to - this.from)) * (this.root.clientWidth - this.gutter);
  }

  timeAt(x) {
    return this.from + ((x - this.gutter) / (this.root.clientWidth - this.gutter)) * (this.to - this.from);
  }

  tops() {
    let top = AXIS + NAMES;
    return this.data.lanes.map((_, lane) => {
      const own = top;
      top += this.laneRows[lane] * ROW + GAP + NAMES;
      return own;
    });
  }

  draw() {
    if (!this.data || !this.root.clientWidth) return;
    const tops = this.tops();
    const width = this.root.clientWidth;
    const height = (tops.at(-1) ?? AXIS) + (this.laneRows[tops.length - 1] ?? 1) * ROW + GAP;
    const scale = devicePixelRatio || 1;
    if (this.canvas.width !== Math.round(width * scale) || this.canvas.height !== Math.round(height * scale)) {
      Object.assign(this.canvas, { width: Math.round(width * scale), height: Math.round(height * scale) });
      Object.assign(this.canvas.style, { width: `${width}px`, height: `${height}px` });
    }
    const pen = this.canvas.getContext("2d");
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, width, height);
    this.font = getComputedStyle(document.body).fontFamily;
    pen.textBaseline = "middle";
    this.drawAxis(pen, width, height);
    [this.boxes, this.names] = [[], []];
    this.drawLanes(pen, tops, width);
    this.canvas.setAttribute(
      "aria-label",
      `Timeline of ${this.data.lanes.length} lanes from ${duration(this.from)} to ${duration(this.to)} after the start. Arrow keys move, plus and minus zoom, n and p go to the next and previous span, Enter opens it.`,
    );
  }

  drawAxis(pen, width, height) {
    const { at, step } = ticks(this.from, this.to, (width - this.gutter) / 120);
    const decimals = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    pen.font = `11px ${this.font}`;
    for (const time of at) {
      const x = Math.round(this.x(time)) + 0.5;
      if (x < this.gutter) continue;
      pen.strokeStyle = colour("line");
      pen.beginPath();
      pen.moveTo(x, AXIS - 6);
      pen.lineTo(x, height);
      pen.stroke();
      pen.fillStyle = colour("muted");
      pen.fillText(
        `${time.toFixed(decimals)} s`,
        Math.min(x + 4, width - 4 - pen.measureText(`${time.toFixed(decimals)} s`).width),
        AXIS / 2,
      );
    }
    pen.fillStyle = colour("text");
    pen.fillText(duration(this.to - this.from), 4, AXIS / 2);
    // What part of the run is in view.
    const [low, high] = this.limits;
    const place = (time) => this.gutter + ((time - low) / (high - low)) * (width - this.gutter);
    pen.fillStyle = colour("line");
    pen.fillRect(this.gutter, AXIS - 4, width - this.gutter, 3);
    pen.fillStyle = colour("accent");
    pen.fillRect(place(this.from), AXIS - 4, Math.max(3, place(this.to) - place(this.from)), 3);
  }

  drawLanes(pen, tops, width) {
    const { lanes, spans, marks } = this.data;
    pen.save();
    pen.beginPath();
    pen.rect(this.gutter, AXIS, width - this.gutter, this.canvas.height);
    pen.clip();
    for (const index of this.order) this.drawSpan(pen, index, tops, spans);
    (marks?.at ?? []).forEach((at, index) => this.drawMark(pen, index, at - this.begin, tops));
    pen.restore();
    lanes.forEach((name, lane) => {
      pen.fillStyle = colour("line");
      if (lane) pen.fillRect(0, tops[lane] - NAMES, width, 1);
      pen.font = `600 12px ${this.font}`;
      pen.fillStyle = colour("text");
      pen.fillText(fitted(pen, oneLine(name), this.gutter - 10), 2, tops[lane] + ROW / 2);
    });
  }

  drawSpan(pen, index, tops, spans) {
    const [start, end] = [spans.start[index] - this.begin, spans.end[index] - this.begin];
    if (end < this.from || start > this.to) return;
    const left = Math.max(this.x(start), this.gutter - 2);
    const wide = Math.max(1, Math.min(this.x(end), this.root.clientWidth + 2) - left);
    const top = tops[spans.lane[index]] + this.rows[index] * ROW;
    const stroke = colour(SPAN_COLOURS[spans.name[index]] ?? "grey");
    pen.fillStyle = wide < 3 ? stroke : `${stroke}40`;
    pen.fillRect(left, top + 1, wide, ROW - 2);
    if (wide >= 3) {
      pen.fillStyle = stroke;
      pen.fillRect(left, top + 1, 2, ROW - 2);
    }
    if (index === this.selected || index === this.hovered) {
      pen.strokeStyle = colour(index === this.selected ? "accent" : "strong-line");
      pen.lineWidth = 2;
      pen.strokeRect(left, top + 1, Math.max(wide, 2), ROW - 2);
      pen.lineWidth = 1;
    }
    if (wide > 26) {
      pen.font = `11px ${this.font}`;
      pen.fillStyle = colour("text");
      const count = (spans.count?.[index] ?? 1) > 1 ? ` × ${spans.count[index]}` : "";
      const length = wide > 110 ? `  ${duration(spans.end[index] - spans.start[index])}` : "";
      pen.fillText(fitted(pen, `${spans.name[index]}${count}${length}`, wide - 8), left + 6, top + ROW / 2 + 0.5);
    }
    this.boxes.push({
      index,
      left: Math.min(left, left + wide / 2 - 3),
      right: Math.max(left + wide, left + wide / 2 + 3),
      top,
      bottom: top + ROW,
    });
  }

  drawMark(pen, index, at, tops) {
    if (at < this.from || at > this.to) return;
    const x = this.x(at);
    const lane = this.data.marks.lane[index];
    const bottom = tops[lane] + this.laneRows[lane] * ROW;
    const name = this.data.marks.name[index];
    pen.strokeStyle = pen.fillStyle = colour(FAULTS.includes(name) ? "bad" : "muted");
    pen.beginPath();
    pen.moveTo(x, tops[lane] - 6);
    pen.lineTo(x, bottom);
    pen.stroke();
    pen.beginPath();
    for (const [dx, dy] of [
      [0, -11],
      [5, -6],
      [0, -1],
      [-5, -6],
    ])
      pen.lineTo(x + dx, tops[lane] + dy);
    pen.fill();
    pen.font = `600 11px ${this.font}`;
    const width = pen.measureText(name).width;
    const left = x + 8 + width > this.root.clientWidth ? x - 8 - width : x + 8;
    const written = (this.names[lane] ??= []);
    if (written.some((other) => left < other.right + 4 && other.left < left + width + 4)) return; // they would overlap
    written.push({ left, right: left + width });
    pen.fillText(name, left, tops[lane] - 5.5);
  }

  hit(event) {
    const found = this.boxes?.findLast(
      ({ left, right, top, bottom }) =>
        event.offsetX >= left && event.offsetX <= right && event.offsetY >= top && event.offsetY < bottom,
    );
    return found?.index ?? null;
  }

  press(event) {
    this.drag = { x: event.offsetX, from: this.from, to: this.to, moved: false };
    this.canvas.setPointerCapture(event.pointerId);
  }

  move(event) {
    if (!this.drag) return this.hover(event);
    const shift =
      ((this.drag.x - event.offsetX) / (this.root.clientWidth - this.gutter)) * (this.drag.to - this.drag.from);
    this.drag.moved ||= Math.abs(this.drag.x - event.offsetX) > 3;
    if (!this.drag.moved) return;
    this.view(this.drag.from + shift, this.drag.to + shift);
    this.onMove();
  }

  release(event) {
    const wasClick = this.drag && !this.drag.moved;
    this.drag = null;
    if (wasClick) this.select(this.hit(event), true);
  }

  hover(event) {
    const index = event ? this.hit(event) : null;
    if (index !== this.hovered) {
      this.hovered = index;
      this.draw();
    }
    this.tip.hidden = index === null;
    this.canvas.classList.toggle("over", index !== null);
    if (index === null) return;
    const { spans } = this.data;
    this.tip.textContent = [
      spans.name[index],
      duration(spans.end[index] - spans.start[index]),
      (spans.count?.[index] ?? 1) > 1 && `${spans.count[index]} merged`,
      spans.version[index] >= 0 && spans.version[index] !== null && `version ${spans.version[index]}`,
      spans.step[index] && `step ${spans.step[index]}`,
      oneLine(spans.detail?.[index] ?? "", 80),
    ]
      .filter(Boolean)
      .join(" · ");
    this.tip.style.left = `${Math.min(event.offsetX + 12, Math.max(0, this.root.clientWidth - this.tip.offsetWidth - 4))}px`;
    this.tip.style.top = `${event.offsetY + 18}px`;
  }

  select(index, open = false) {
    this.selected = index;
    this.draw();
    this.onSelect(index, open);
  }

  zoom(factor, around = this.selectedTime() ?? (this.from + this.to) / 2) {
    this.view(around - (around - this.from) * factor, around + (this.to - around) * factor);
    this.onMove();
  }

  selectedTime() {
    if (this.selected === null) return null;
    const middle = (this.data.spans.start[this.selected] + this.data.spans.end[this.selected]) / 2 - this.begin;
    return middle > this.from && middle < this.to ? middle : null;
  }

  pan(share) {
    const shift = share * (this.to - this.from);
    this.view(this.from + shift, this.to + shift);
    this.onMove();
  }

  /** The page scrolls as usual; with Ctrl, or over a focused canvas, the wheel zooms, and sideways it moves. */
  wheel(event) {
    const isSideways = Math.abs(event.deltaX) > Math.abs(event.deltaY);
    if (!isSideways && !event.ctrlKey && !event.metaKey && document.activeElement !== this.canvas) return;
    event.preventDefault();
    if (isSideways) this.pan(event.deltaX / 800);
    else this.zoom(Math.exp(event.deltaY / 400), this.timeAt(event.offsetX));
  }

  key(event) {
    if (!this.data || event.ctrlKey || event.metaKey || event.altKey) return;
    const actions = {
      ArrowLeft: () => this.pan(-0.2),
      ArrowRight: () => this.pan(0.2),
      "+": () => this.zoom(0.5),
      "=": () => this.zoom(0.5),
      "-": () => this.zoom(2),
      0: () => this.all(),
      Home: () => this.jump(this.limits[0]),
      End: () => this.jump(this.limits[1]),
      n: () => this.next(1),
      p: () => this.next(-1),
      Enter: () => this.select(this.selected, true),
      Escape: () => this.select(null),
    };
    const action = actions[event.key];
    if (!action) return;
    event.preventDefault();
    event.stopPropagation();
    action();
  }

  all() {
    this.view(...this.limits);
    this.onMove();
  }

  jump(time) {
    const width = this.to - this.from;
    this.view(time - width / 2, time + width / 2);
    this.onMove();
  }

  /** Select the next or previous span in order of their start, and keep it in view. */
  next(by) {
    const { spans } = this.data;
    const inView = (index) => spans.end[index] - this.begin >= this.from && spans.start[index] - this.begin <= this.to;
    const order = this.selected === null ? this.order.filter(inView) : this.order;
    const place = this.selected === null ? (by > 0 ? 0 : order.length - 1) : order.indexOf(this.selected) + by;
    const index = order[place];
    if (index === undefined) return;
    this.select(index);
    if (inView(index)) return;
    this.jump((spans.start[index] + spans.end[index]) / 2 - this.begin);
  }

  destroy() {
    this.observer.disconnect();
  }
}

function fitted(pen, text, width) {
  if (pen.measureText(text).width <= width) return text;
  let short = text;
  while (short && pen.measureText(`${short}…`).width > width) short = short.slice(0, -1);
  return short && `${short}…`;
}
