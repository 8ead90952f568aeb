// Elements from data. Text is always a text node: nothing that a model wrote is ever markup, and no character of a name
// reorders a line or hides in it.

import { visible } from "./format.js";

const SVG = "http://www.w3.org/2000/svg";
const READ_OUT = new Set(["title", "aria-label", "placeholder"]);

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(node.style, value);
    else if (name === "class") node.setAttribute("class", value);
    else if (name === "value" || name === "checked" || name === "selected") node[name] = value;
    else if (READ_OUT.has(name)) node.setAttribute(name, visible(String(value)));
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...drawn(children));
  return node;
}

function drawn(children) {
  return children.flat(Infinity).filter((c) => c !== null && c !== undefined && c !== false)
    .map((c) => (c instanceof Node ? c : visible(String(c))));
}

// h("button", {class: "quiet", onclick: go}, "Go")
export function h(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

export function put(parent, ...children) {
  parent.replaceChildren(...drawn(children));
  return parent;
}

// Tell a screen reader.
export function say(text) {
  document.getElementById("said").textContent = visible(text);
}

export function select(label, value, options, onchange, attributes = {}) {
  const choices = options.map((o) => (Array.isArray(o) ? o : [o, o]));
  const box = h("select", { "aria-label": label, onchange: (e) => onchange(e.target.value), ...attributes },
    choices.map(([key, text]) => h("option", { value: key, selected: String(key) === String(value) }, text)));
  return h("label", { class: "field" }, h("span", {}, label), box);
}

// columns: [{title, show(row), word?: left-aligned and cut where it is long, tip?: what its title means}]
export function table(columns, rows, attributes = {}) {
  return h("div", { class: "scroll" }, h("table", attributes,
    h("thead", {}, h("tr", {}, columns.map((c) => h("th", { scope: "col", class: c.word ? "word" : "", title: c.tip }, c.title)))),
    h("tbody", {}, rows.map((row) => h("tr", {}, columns.map((c, i) => {
      const shown = c.show(row);
      return h(i === 0 ? "th" : "td", { scope: i === 0 ? "row" : null, class: c.word ? "word" : "", title: typeof shown === "string" ? shown : null }, shown);
    }))))));
}

export function copier(text, label) {
  return h("button", { class: "quiet", type: "button", onclick: async (e) => {
    const button = e.currentTarget;
    try { await navigator.clipboard.writeText(typeof text === "function" ? await text() : text); button.textContent = "copied"; }
    catch { button.textContent = "cannot copy here"; }
    setTimeout(() => { button.textContent = label; }, 1200);
  } }, label);
}

// Controls that are one stop of the Tab key together: arrows, Home and End move among them.
export function oneStop(root, selector) {
  const items = () => [...root.querySelectorAll(selector)];
  items().forEach((item, i) => { item.tabIndex = i ? -1 : 0; });
  if (root.dataset.oneStop) return;
  root.dataset.oneStop = selector;
  root.addEventListener("keydown", (e) => {
    const all = items(), at = all.indexOf(e.target);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: all.length - 1 }[e.key];
    if (at < 0 || to === undefined) return;
    e.preventDefault();
    e.stopPropagation();
    all[at].tabIndex = -1;
    const next = all[Math.min(all.length - 1, Math.max(0, to))];
    next.tabIndex = 0;
    next.focus();
  });
}
