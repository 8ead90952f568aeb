// The tokens of a response as text, with a colour behind each and a track a teacher below. Only lines in sight exist.

import { h } from "./dom.js";
import { paint } from "./colours.js";
import { shown } from "./format.js";

const TEXT_PX = 21;
const TRACK_PX = 6;
const GAP_PX = 7;
const AHEAD = 12; // lines beyond the window that are kept ready
const LONGEST = 60; // characters of one token that the strip shows
const GUTTER = 7; // characters left of the text

function wide(character) {
  const code = character.codePointAt(0);
  return code >= 0x1100 && (code <= 0x115f || (code >= 0x2e80 && code <= 0xa4cf) || (code >= 0xac00 && code <= 0xd7a3)
    || (code >= 0xf900 && code <= 0xfaff) || (code >= 0xfe30 && code <= 0xfe6f) || (code >= 0xff00 && code <= 0xff60)
    || code >= 0x1f300) ? 2 : 1;
}

function widthOf(text) {
  if (/^[\x20-\x7e]*$/.test(text)) return text.length;
  let width = 0;
  for (const character of text) width += wide(character);
  return width;
}

const sheet = new CSSStyleSheet(), rules = new Set();
document.adoptedStyleSheets = [...document.adoptedStyleSheets, sheet];

function rule(name, text) {
  if (!rules.has(name)) { rules.add(name); sheet.insertRule(`.strip .${name} { ${text} }`); }
  return name;
}

// The class that gives place n of a token (0 its text, then a track each) a colour.
function inked(n, colour) {
  return rule(`p${n}${colour.replace(/[^a-z0-9]/g, "")}`, `--p${n}: ${colour}`);
}

// The class of lines whose tokens have so many tracks.
function layered(tracks) {
  const stops = [`var(--p0) 0 ${TEXT_PX}px`];
  for (let n = 1; n <= tracks; n += 1) {
    const top = TEXT_PX + (n - 1) * TRACK_PX;
    stops.push(`var(--paper) ${top}px ${top + 1}px`, `var(--p${n}) ${top + 1}px ${top + TRACK_PX}px`);
  }
  rule(`tracks${tracks} .t`, `background-image: linear-gradient(${stops.join(", ")})`);
  return `tracks${tracks}`;
}

export class Strip {
  // options: data, signal, tracks, selected, onselect(position)
  constructor(options) {
    Object.assign(this, options);
    this.texts = this.data.pieces.map((p) => {
      const text = shown(p);
      return text.length > LONGEST ? `${text.slice(0, LONGEST)}…` : text || "·";
    });
    this.widths = this.texts.map(widthOf);
    this.breaks = this.data.pieces.map((p) => p.includes("\n"));
    this.lines = [];
    this.drawn = new Map();
    this.inner = h("div", { class: "strip-inner" });
    this.root = h("div", {
      class: "strip", tabindex: 0, role: "listbox", "aria-label": "Response, token by token",
      "aria-describedby": "strip-help", onscroll: () => this.later(), onclick: (e) => this.clicked(e), oncopy: (e) => this.copied(e),
    }, this.inner);
    this.watch = new ResizeObserver(() => this.layout());
    this.watch.observe(this.root);
  }

  close() { this.watch.disconnect(); }

  later() {
    if (this.pending) return;
    this.pending = requestAnimationFrame(() => { this.pending = 0; this.draw(); });
  }

  lineHeight() { return TEXT_PX + GAP_PX + TRACK_PX * this.tracks.length; }

  layout() {
    const style = getComputedStyle(this.root);
    const pen = (Strip.pen ||= document.createElement("canvas").getContext("2d"));
    pen.font = `${style.fontSize} ${style.fontFamily}`;
    const character = pen.measureText("0123456789").width / 10 || 8;
    this.unit = character;
    const columns = Math.max(12, Math.floor((this.root.clientWidth - 10) / character) - GUTTER);
    if (columns === this.columns && this.lines.length) { this.draw(); return; }
    this.columns = columns;
    this.lines = [];
    let used = 0, start = 0;
    for (let i = 0; i < this.texts.length; i += 1) {
      if (used + this.widths[i] > columns && i > start) { this.lines.push(start); start = i; used = 0; }
      used += this.widths[i];
      if (this.breaks[i]) { this.lines.push(start); start = i + 1; used = 0; }
    }
    if (start < this.texts.length) this.lines.push(start);
    this.restyle();
  }

  // Signal, tracks or selection changed: draw every line in sight again.
  restyle() {
    this.drawn.forEach((line) => line.remove());
    this.drawn.clear();
    this.inner.style.setProperty("--token", `${TEXT_PX + TRACK_PX * this.tracks.length}px`);
    this.inner.style.height = `${this.lines.length * this.lineHeight() + 4}px`;
    this.root.style.height = `${this.lines.length * this.lineHeight() + 16}px`;
    this.draw();
  }

  lineOf(position) {
    let low = 0, high = this.lines.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.lines[middle] <= position) low = middle; else high = middle - 1;
    }
    return low;
  }

  draw() {
    const height = this.lineHeight();
    const first = Math.max(0, Math.floor(this.root.scrollTop / height) - AHEAD);
    const last = Math.min(this.lines.length - 1, Math.ceil((this.root.scrollTop + this.root.clientHeight) / height) + AHEAD);
    for (const [number, line] of this.drawn) if (number < first || number > last) { line.remove(); this.drawn.delete(number); }
    const fresh = document.createDocumentFragment();
    for (let number = first; number <= last; number += 1) {
      if (this.drawn.has(number)) continue;
      const line = this.line(number, height);
      this.drawn.set(number, line);
      fresh.append(line);
    }
    this.inner.append(fresh);
  }

  line(number, height) {
    const start = this.lines[number], end = this.lines[number + 1] ?? this.texts.length;
    const line = document.createElement("div");
    line.className = `line ${layered(this.tracks.length)}`;
    line.style.top = `${number * height}px`;
    const gutter = document.createElement("span");
    gutter.className = "gutter";
    gutter.textContent = String(start);
    gutter.setAttribute("aria-hidden", "true");
    line.append(gutter);
    for (let i = start; i < end; i += 1) line.append(this.token(i));
    return line;
  }

  token(i) {
    const node = document.createElement("span");
    node.className = `t ${this.background(i)}${this.data.mask[i] ? "" : " masked"}`;
    if (i === this.selected) { node.className += " chosen"; node.setAttribute("aria-selected", "true"); }
    if (this.starts(i)) node.className += " starts";
    node.id = `t${i}`;
    node.dataset.i = i;
    node.setAttribute("role", "option");
    node.textContent = this.texts[i];
    return node;
  }

  // Whether another policy version goes on here.
  starts(i) { return i > 0 && this.data.spans.some((span) => span.start === i); }

  // Classes that colour a token: its own signal, then a track each. A rule a colour, not a style a token.
  background(i) {
    let names = this.signal ? inked(0, paint(this.signal.scale, this.signal.level(this.signal.values[i]))) : inked(0, "transparent");
    this.tracks.forEach((track, n) => { names += ` ${inked(n + 1, paint(track.scale, track.level(track.values[i])))}`; });
    return names;
  }

  clicked(event) {
    const node = event.target.closest(".t");
    if (node) this.onselect(Number(node.dataset.i));
  }

  // What is selected, as the text that it is: without numbers of positions and without a line for each token.
  copied(event) {
    const range = getSelection().getRangeAt(0);
    const tokens = [...this.inner.querySelectorAll(".t")].filter((node) => range.intersectsNode(node)).map((node) => Number(node.dataset.i));
    if (!tokens.length) return;
    event.preventDefault();
    event.clipboardData.setData("text/plain", this.data.pieces.slice(Math.min(...tokens), Math.max(...tokens) + 1).join(""));
  }

  choose(position) {
    const before = this.inner.querySelector(`#t${this.selected}`);
    if (before) { before.classList.remove("chosen"); before.removeAttribute("aria-selected"); }
    this.selected = position;
    if (!this.lines.length) return;
    const height = this.lineHeight(), top = this.lineOf(position) * height;
    if (top < this.root.scrollTop || top + height > this.root.scrollTop + this.root.clientHeight) {
      this.root.scrollTop = Math.max(0, top - this.root.clientHeight / 3);
    }
    this.draw();
    const node = this.inner.querySelector(`#t${position}`);
    if (node) {
      node.classList.add("chosen");
      node.setAttribute("aria-selected", "true");
      this.root.setAttribute("aria-activedescendant", node.id);
    }
  }
}
