// Elements without markup: every text becomes a text node, so that nothing from a run is ever parsed as HTML.

const SVG = "http://www.w3.org/2000/svg";

/** `h("button.primary", {onclick: run, "aria-label": "Go"}, "Go")`. A property that is null or false is left out. */
export function h(selector, properties = {}, ...children) {
  const [tag, ...classes] = selector.split(".");
  return fill(document.createElement(tag), classes, properties, children);
}

export function svg(tag, properties = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), [], properties, children);
}

function fill(element, classes, properties, children) {
  if (classes.length) element.classList.add(...classes);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, part] of Object.entries(value)) element.style.setProperty(key, part);
    else if (["value", "checked", "selected"].includes(name)) element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  append(element, children);
  return element;
}

function append(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : String(child));
  }
}

/** Replace the children of an element. */
export function render(element, ...children) {
  const fragment = document.createDocumentFragment();
  append(fragment, children);
  element.replaceChildren(fragment);
  return element;
}

/** The same for data that has changed: what had the focus has it afterwards, and what was scrolled stays so. */
export function update(element, ...children) {
  const focused = element.contains(document.activeElement) ? document.activeElement : null;
  const scrolled = [...element.querySelectorAll(".scroll")].map(({ scrollTop, scrollLeft }) => ({
    scrollTop,
    scrollLeft,
  }));
  render(element, ...children);
  element.querySelectorAll(".scroll").forEach((part, index) => Object.assign(part, scrolled[index]));
  if (!focused) return;
  const label = (one) => one.getAttribute("aria-label") ?? one.textContent;
  const same = [...element.querySelectorAll(focused.tagName)].find((one) => label(one) === label(focused));
  same?.focus({ preventScroll: true });
}

/** An icon of a few lines in a 16 × 16 box; decoration only. */
export function icon(path) {
  return svg(
    "svg",
    { viewBox: "0 0 16 16", width: 16, height: 16, "aria-hidden": "true", class: "icon" },
    svg("path", {
      d: path,
      fill: "none",
      stroke: "currentColor",
      "stroke-width": 1.5,
      "stroke-linecap": "round",
      "stroke-linejoin": "round",
    }),
  );
}

/** Say something to a screen reader. */
export function announce(text) {
  document.getElementById("announcer").textContent = text;
}

/** The same for an error, unless it only says that a newer request took the place of this one. */
export function announceError(error) {
  if (error.name !== "AbortError") announce(error.message);
}

/** A function that runs once after calls have stopped for `delay` ms. */
export function debounce(run, delay) {
  let timer = 0;
  return (...values) => {
    clearTimeout(timer);
    timer = setTimeout(() => run(...values), delay);
  };
}
