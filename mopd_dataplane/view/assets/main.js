// The frame: which page the address names, keys, theme, and what a growing store brings.

import { ask, forget, isStatic, link, whenGone } from "./api.js";
import { closeCharts } from "./chart.js";
import { comparePage } from "./compare.js";
import { h, put, say, select } from "./dom.js";
import { receive } from "./files.js";
import { count, visible } from "./format.js";
import { homePage } from "./home.js";
import { lifePage } from "./life.js";
import { livePanel } from "./live.js";
import { promptPage } from "./prompt.js";
import { runPage } from "./run.js";
import { runsPage } from "./runs.js";
import { samplePage } from "./sample.js";
import { samplesPage } from "./samples.js";
import { sqlPage } from "./sql.js";
import { address, adjust, go, listen, read } from "./state.js";
import { stepPage } from "./step.js";
import { about, keyOf, parts, readStores } from "./stores.js";
import { teachersPage } from "./teachers.js";

const PAGES = { home: homePage, runs: runsPage, samples: samplesPage, sample: samplePage, prompt: promptPage, life: lifePage, run: runPage, teachers: teachersPage, step: stepPage, compare: comparePage, sql: sqlPage };
const TABS = [["home", "Red pen"], ["samples", "Samples"], ["run", "Run"], ["teachers", "Teachers"], ["compare", "Compare"], ["sql", "SQL"]];
const EVERYWHERE = {
  "?": ["list the keys", () => showKeys()],
  0: ["red pen", () => tab("home")], 1: ["samples", () => tab("samples")], 2: ["run", () => tab("run")], 3: ["teachers", () => tab("teachers")],
  4: ["compare", () => tab("compare")], 5: ["SQL", () => tab("sql")], d: ["light or dark", () => theme(true)],
};
const FOLLOW_MS = 2000;
const RETRY_MS = 1500;

let stores = [], keys = {}, closing = () => {}, stopping = new AbortController(), drawing = 0, waiting = false;
const main = document.getElementById("main");

function tab(view) {
  const { store } = read().params;
  go(view, "", { store });
}

function theme(turn) {
  const root = document.documentElement;
  let now = "";
  try { now = localStorage.getItem("mopd-theme") || ""; } catch { /* a page from disk may have no storage */ }
  const dark = now ? now === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  if (turn) {
    now = dark ? "light" : "dark";
    try { localStorage.setItem("mopd-theme", now); } catch { /* as above */ }
  }
  if (now) root.dataset.theme = now;
  if (turn) draw();
}

function showKeys() {
  const rows = (own) => Object.entries(own).map(([key, [text]]) => h("tr", {}, h("th", { scope: "row" }, h("kbd", {}, key)), h("td", {}, text)));
  const box = h("dialog", { class: "keys", "aria-label": "Keys", onclose: () => box.remove() }, h("h2", {}, "Keys"),
    h("div", { class: "two" }, h("table", {}, h("tbody", {}, rows(keys))), h("table", {}, h("tbody", {}, rows(EVERYWHERE)))),
    h("form", { method: "dialog" }, h("button", { autofocus: true }, "close")));
  document.body.append(box);
  box.showModal();
}

// Which snapshot of the store the page shows.
function snapshots(store, params) {
  const { place, snapshot } = parts(params.store), newest = stores[Number(place)] || stores[0];
  const tags = (store || newest).tags.toSorted((a, b) => a.localeCompare(b, undefined, { numeric: true }));
  const others = [...(snapshot && !tags.includes(snapshot) ? [snapshot] : newest.follow && !snapshot ? [newest.digest] : []), ...tags];
  if (isStatic() || !others.length) return null;
  return select("snapshot", snapshot, [["", "newest"], ...others.map((name) => [name, name === newest.digest ? `${name}, as shown` : name])],
    (name) => adjust({ store: keyOf(place, name), page: "", at: "" }));
}

function top(view, params, store) {
  const tabs = isStatic() ? TABS.filter(([key]) => ["home", "samples", "run", "teachers"].includes(key) && (key in window.mopdFiles.keys || key in window.mopdFiles.data)) : stores.length > 1 ? [["runs", "Runs"], ...TABS] : TABS;
  put(document.getElementById("top"), h("a", { class: "brand", href: isStatic() ? window.mopdFiles.start : "#/home" }, "mopd view"),
    stores.length > 1 ? select("store", parts(params.store).place, stores.map((s, i) => [String(i), s.name]), (store) => adjust({ store, page: "", at: "" }))
      : h("span", { class: "store", title: stores[0].uri }, stores[0].name),
    snapshots(store, params),
    h("nav", { "aria-label": "Pages" }, tabs.map(([key, title]) => h("a", { href: address(key, "", { store: params.store }), "aria-current": key === view ? "page" : null }, title))),
    h("span", { class: "fill" }), h("span", { id: "live-mark", class: "where" }),
    h("button", { class: "quiet", onclick: () => theme(true), "aria-label": "Light or dark", title: "Light or dark (d)" }, "◐"),
    h("button", { class: "quiet", onclick: showKeys, "aria-label": "Keys", title: "Keys (?)" }, "?"));
}

function heading(now, store) {
  top(now.view, now.params, store);
  document.title = visible(`${now.id ? `${now.id.slice(0, 12)} · ` : ""}${now.view} · ${(store || stores[0]).name} · mopd view`);
}

// A line over the page about what is wrong with all of it; "" takes it away.
function banner(text) {
  let line = document.getElementById("banner");
  if (!text) { if (line) line.remove(); return; }
  if (!line) {
    line = h("p", { id: "banner", role: "alert" });
    document.getElementById("top").after(line);
  }
  if (line.textContent !== text) put(line, text);
}

// The server is gone: wait for it, with the page as it was.
function reconnect() {
  if (waiting) return;
  waiting = true;
  banner("The server does not answer: it was ended, or the tunnel to it is closed. This page goes on as soon as it is back.");
  const look = async () => {
    let status = 0;
    try { status = (await fetch(link("stores"))).status; } catch { /* not yet */ }
    if (status === 401) banner("The server was started again with another token: open the address that it printed. With --token-file the token stays.");
    if (status !== 200) { setTimeout(look, RETRY_MS); return; }
    waiting = false;
    banner("");
    stores = await readStores();
    forget();
    await draw({ still: true });
  };
  setTimeout(look, RETRY_MS);
}

async function draw({ still = false } = {}) {
  const now = read(), own = (drawing += 1), place = scrollY;
  stopping.abort();
  stopping = new AbortController();
  closing();
  closing = () => {};
  closeCharts();
  main.setAttribute("aria-busy", "true");
  let found = { keys: {} }, store = null;
  try {
    store = await about(now.params.store);
    if (own !== drawing) return;
    heading(now, store);
    found = await (PAGES[now.view] || homePage)(main, now, { store, stores, signal: stopping.signal });
  } catch (error) {
    if (own !== drawing || error.name === "AbortError") return;
    if (error.unreachable) { main.removeAttribute("aria-busy"); return; }
    if (!store) heading(now, store);
    put(main, h("h1", {}, "This cannot be shown"), h("p", { class: "damage", role: "alert" }, error.message), h("p", {}, h("a", { href: "#/samples" }, "all samples")));
  }
  if (own !== drawing) { if (found.close) found.close(); return; }
  keys = found.keys;
  closing = found.close || (() => {});
  main.removeAttribute("aria-busy");
  if (still) scrollTo(0, place);
  if (document.activeElement === document.body) main.focus({ preventScroll: true }); // Tab goes on at what was drawn
  if (now.params.focus) document.getElementById(now.params.focus)?.focus();
}

function pressed(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, textarea, select, dialog")) return;
  if (event.key === "Enter" && event.target.closest("a, button, summary")) return;
  const found = keys[event.key] || EVERYWHERE[event.key];
  if (!found) return;
  event.preventDefault();
  found[1]();
}

async function follow() {
  if (!document.hidden) {
    try {
      const { place, snapshot } = parts(read().params.store), pulse = await ask("pulse", { store: place });
      if (pulse.digest !== stores[Number(place)].digest) {
        stores = await readStores();
        forget();
        const view = read().view;
        if (!snapshot && view !== "sample" && view !== "sql" && !document.activeElement.closest("input, textarea, select")) await draw({ still: true });
      }
      document.getElementById("live-mark").textContent = snapshot ? "" : `● live · ${count(pulse.writing)} being written`;
      livePanel(snapshot ? [] : pulse.live, pulse.writing);
      if (!waiting) banner("");
    } catch (error) { if (!error.unreachable) banner(error.message); }
  }
  setTimeout(follow, FOLLOW_MS);
}

async function begin() {
  theme(false);
  whenGone(reconnect);
  if (isStatic()) window.mopdData = receive;
  put(main, h("p", { class: "empty" }, "reading the store…"));
  try { stores = await readStores(); } catch (error) { put(main, h("p", { class: "damage", role: "alert" }, error.message)); return; }
  if (!isStatic() && stores.length > 1 && !location.hash) history.replaceState(null, "", "#/runs");
  if (isStatic() && !location.hash) history.replaceState(null, "", window.mopdFiles.start);
  listen(draw);
  addEventListener("keydown", pressed);
  await draw();
  if (stores[0].follow) follow();
}

begin();
