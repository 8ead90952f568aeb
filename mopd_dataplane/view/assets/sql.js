// Any read-only question, in the sandbox of `mopd query`: the schema beside it, the answer as a table, a plot, CSV or Markdown.

import { ask } from "./api.js";
import { chart } from "./chart.js";
import { copier, h, put, select, table } from "./dom.js";
import { cell, count, number, short, visible } from "./format.js";
import { adjust, address } from "./state.js";
import { curlOf } from "./sources.js";

const BARS = 40; // most bars of a plot over words
const LINES = 8; // most lines of a plot

const textOf = (value) => (value === null || value === undefined ? "" : typeof value === "object" ? JSON.stringify(value) : String(value));
const quoted = (text) => (/[",\r\n]/.test(text) ? `"${text.replace(/"/g, '""')}"` : text);

function csvOf({ columns, rows }) {
  return [columns, ...rows].map((row) => row.map((value) => quoted(textOf(value))).join(",")).join("\r\n") + "\r\n";
}

function markdownOf({ columns, rows }) {
  const line = (row) => `| ${row.map((value) => visible(textOf(value)).replace(/\\/g, "\\\\").replace(/\|/g, "\\|").replace(/\n/g, " ")).join(" | ")} |`;
  return [line(columns), `|${columns.map((_, i) => (rows.every((row) => typeof row[i] === "number") ? " ---: " : " --- ")).join("|")}|`, ...rows.map(line)].join("\n") + "\n";
}

function download(name, text) {
  const link = h("a", { href: URL.createObjectURL(new Blob([text], { type: "text/csv" })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

// Tables, views and macros; the columns of one are read when it is opened, and a click writes a name into the query.
function schema(params, box) {
  const write = (name) => {
    box.setRangeText(name, box.selectionStart, box.selectionEnd, "end");
    box.focus();
  };
  const name = (text, doc) => h("button", { class: "quiet mono", type: "button", title: doc, onclick: () => write(text) }, text);
  const aside = h("aside", { class: "schema", "aria-label": "Schema" }, h("h2", {}, "Schema"));
  ask("schema", { store: params.store || 0 }).then((relations) => aside.append(...relations.map((relation) => {
    const list = h("ul", {});
    const node = h("details", { ontoggle: async () => {
      if (!node.open || list.children.length) return;
      try {
        const columns = await ask("schema", { store: params.store || 0, table: relation.name });
        put(list, columns.map((c) => h("li", {}, name(c.name, c.doc), h("small", {}, ` ${c.type}${c.unit ? `, ${c.unit}` : ""}`), c.doc ? h("p", { class: "where" }, c.doc) : null)));
      } catch (error) { put(list, h("li", { class: "damage" }, error.message)); }
    } }, h("summary", {}, relation.name, h("small", {}, ` ${relation.rows === null ? relation.kind : `${count(relation.rows)} ${relation.rows === 1 ? "row" : "rows"}`}`)),
    h("p", { class: "where" }, relation.doc, " ", name(relation.name.split("(")[0], "Write the name into the query")), list);
    return node;
  }))).catch((error) => aside.append(h("p", { class: "damage" }, error.message)));
  return aside;
}

function bars(points, x, y) {
  const most = Math.max(...points.map(([, value]) => Math.abs(value))) || 1;
  return h("figure", { class: "chart" }, h("figcaption", {}, `${y} by ${x}`),
    h("ul", { class: "bars" }, points.slice(0, BARS).map(([word, value]) => h("li", {}, h("span", {}, short(String(word ?? "null"), 40)),
      h("i", { style: { width: `${(100 * Math.abs(value)) / most}%` } }), h("small", {}, Number.isInteger(value) ? count(value) : number(value))))),
    points.length > BARS ? h("p", { class: "where" }, `the first ${BARS} of ${count(points.length)}`) : null);
}

// A line for each value of the column `by`; bars where x has words. Nothing where no column has numbers.
function plot({ columns, rows }, params) {
  const numeric = columns.filter((_, i) => rows.some((row) => typeof row[i] === "number"));
  if (rows.length < 2 || !numeric.length || columns.length < 2) return null;
  const pick = (wish, fallback) => (columns.includes(wish) ? wish : fallback);
  const root = h("section", { "aria-label": "Plot" }), chosen = { x: pick(params.px, columns[0]) };
  chosen.y = pick(params.py, numeric.find((name) => name !== chosen.x) || numeric[0]);
  chosen.by = pick(params.pb, columns.find((name) => name !== chosen.x && !numeric.includes(name)) || "");
  const draw = () => {
    const at = (name) => columns.indexOf(name), [x, y, by] = [at(chosen.x), at(chosen.y), at(chosen.by)];
    const set = (key, parameter) => (value) => { chosen[key] = value; adjust({ [parameter]: value }, { keep: true }); draw(); };
    const points = rows.filter((row) => typeof row[y] === "number");
    const lines = new Map();
    for (const row of points) {
      const line = by < 0 ? chosen.y : textOf(row[by]) || "null";
      if (!lines.has(line)) lines.set(line, []);
      lines.get(line).push(row);
    }
    const drawn = [...lines].slice(0, LINES).map(([name, own]) => ({ name, x: own.map((row) => row[x]), y: own.map((row) => row[y]) }));
    put(root, h("div", { class: "row controls" }, select("plot", chosen.y, numeric, set("y", "py")), select("over", chosen.x, columns, set("x", "px")),
      select("a line for each", chosen.by, [["", "–"], ...columns], set("by", "pb"))),
    numeric.includes(chosen.x) ? chart(drawn, { title: `${chosen.y} over ${chosen.x}`, x: chosen.x, height: 260 }) : bars(points.map((row) => [textOf(row[x]), row[y]]), chosen.x, chosen.y),
    lines.size > LINES && numeric.includes(chosen.x) ? h("p", { class: "where" }, `the first ${LINES} of ${count(lines.size)} lines`) : null);
  };
  draw();
  return root;
}

export async function sqlPage(main, { params }, { store, signal }) {
  const q = params.q || "select domain, count(*) as samples from samples group by domain order by domain";
  const run = () => adjust({ q: box.value, px: "", py: "", pb: "" });
  const box = h("textarea", { class: "query", spellcheck: "false", rows: Math.min(24, q.split("\n").length + 1), "aria-label": "SQL", onkeydown: (e) => {
    if (e.key === "Enter" && (e.ctrlKey || e.metaKey)) { e.preventDefault(); run(); }
    e.stopPropagation();
  } });
  box.value = q;
  const out = h("div", { "aria-live": "polite" });
  put(main, h("h1", {}, "SQL"), h("p", { class: "lead" }, "Any read-only statement on the snapshot of this page. Ctrl-Enter runs it."),
    h("div", { class: "asking" }, h("div", {}, box, h("div", { class: "row" }, h("button", { onclick: run }, "run"), copier(() => box.value, "copy SQL"),
      copier(() => curlOf("sql", { store: params.store || 0, q: box.value }), "copy as curl")), out), schema(params, box)));
  try {
    const answer = await ask("sql", { store: params.store || 0, q }, { signal });
    put(out, h("div", { class: "row" }, h("p", { class: "status" }, answer.more ? `the first ${count(answer.rows.length)} rows` : `${count(answer.rows.length)} ${answer.rows.length === 1 ? "row" : "rows"}`),
      copier(() => csvOf(answer), "copy as CSV"), copier(() => markdownOf(answer), "copy as Markdown"),
      h("button", { class: "quiet", type: "button", onclick: () => download(`${store.name.replace(/[^\w-]+/g, "-")}.csv`, csvOf(answer)) }, "download CSV")),
    plot(answer, params),
    table(answer.columns.map((title, i) => ({ title, word: answer.rows.some((row) => typeof row[i] === "string"), show: (row) => {
      const text = short(typeof row[i] === "object" && row[i] !== null ? JSON.stringify(row[i]) : cell(row[i]), 300);
      return title === "uid" && row[i] ? h("a", { href: address("sample", row[i], { store: params.store }) }, text) : text;
    } })), answer.rows));
  } catch (error) { if (error.name !== "AbortError") put(out, h("pre", { class: "damage", role: "alert" }, error.message)); }
  return { keys: { f: ["edit the query", () => box.focus()] } };
}
