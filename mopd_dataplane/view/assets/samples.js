// The table of rollouts: histograms in the heads, filters as SQL, flags, sorting, paging, search in what was written.

import { ask, isStatic } from "./api.js";
import { copier, h, put, say, select } from "./dom.js";
import { cell, count, short } from "./format.js";
import { histogram } from "./histogram.js";
import { searchPanel } from "./search.js";
import { curlOf, quote } from "./sources.js";
import { adjust, address, asSql, conditions, go, whereOf, whole, withCondition } from "./state.js";
import { parts } from "./stores.js";

const PAGE = 50;
const TEXT_AT = 2; // prompt and answer stand behind this many columns
const FIRST = ["uid", "domain", "stage", "iteration", "policy_version_first", "response_len", "reward", "kl"];
const THEN = ["mean_logprob", "finish_reason"];

function chosenColumns(store, params) {
  const chosen = (params.cols || "").split(",").filter((c) => store.columns.some((k) => k.name === c));
  if (chosen.length) return chosen;
  const own = store.columns.map((c) => c.name).filter((n) => n.startsWith("kl_") && n !== "kl_spread").slice(0, 4);
  return [...FIRST, ...own, ...THEN].filter((c) => store.columns.some((k) => k.name === c));
}

const TITLES = { policy_version_first: "version", response_len: "length", mean_logprob: "mean log p", finish_reason: "finish" };

// A chip for every label that samples bear; a click filters by it.
async function showLabels(place, params) {
  const counts = new Map();
  for (const row of await ask("labelled", { store: params.store || 0 }).catch(() => [])) counts.set(row.label, (counts.get(row.label) || 0) + 1);
  put(place, [...counts].map(([label, n]) => {
    const sql = `uid in (select uid from labelled where label = '${label.replace(/'/g, "''")}')`;
    const on = (params.w || "") === sql;
    return h("button", { class: on ? "chip on" : "chip", "aria-pressed": String(on), title: `${count(n)} samples bear this label`,
      onclick: () => adjust({ w: on ? "" : sql, page: "", at: "" }) }, `🏷 ${short(label, 24)}`);
  }));
}

// sql: gives the statement of the table; null where there is no table.
function filterBar(store, params, sql) {
  const where = whereOf(params), { snapshot } = parts(params.store);
  const box = h("textarea", {
    id: "where", rows: 1, spellcheck: "false", "aria-label": "Filter as SQL", placeholder: "all samples; or an SQL condition: reward < 1 and response_len > 100",
    disabled: isStatic(), onkeydown: (e) => {
      if (e.key === "Enter" && !e.shiftKey) { e.preventDefault(); adjust({ w: box.value.trim(), f: "", page: "", at: "" }); }
      if (e.key === "Escape") { box.value = where; box.blur(); }
      e.stopPropagation();
    },
  });
  box.value = where;
  const chips = conditions(params).map((c) => h("button", {
    class: "chip on", title: "Remove this condition", onclick: () => adjust(withCondition(params, { c: c.c, clear: true })),
  }, asSql(c), " ×"));
  const flags = store.flags.map((flag) => {
    const on = conditions(params).some((c) => c.c === flag && c.flag);
    const doc = store.columns.find((c) => c.name === flag);
    return h("button", { class: on ? "chip on" : "chip", "aria-pressed": String(on), title: doc ? doc.doc : "",
      onclick: () => adjust(withCondition(params, { c: flag, flag: true, clear: on })) }, flag.replace(/_/g, " "));
  });
  const labels = h("span", { class: "row chips", "aria-label": "Labels" });
  if (!isStatic()) showLabels(labels, params);
  return h("section", { class: "filters", "aria-label": "Filters" },
    h("div", { class: "row" }, h("label", { class: "prefix", for: "where" }, "where"), box,
      where ? h("button", { class: "quiet", onclick: () => adjust({ w: "", f: "", page: "", at: "" }) }, "clear") : null),
    h("div", { class: "row chips" }, chips, chips.length ? h("span", { class: "bar-rule" }) : null, flags, labels),
    isStatic() || !sql ? null : h("details", {}, h("summary", {}, "SQL and curl of this table"),
      h("pre", { class: "sql" }, sql()),
      h("div", { class: "row" }, copier(sql, "copy SQL"),
        copier(() => `mopd query ${quote(store.uri)} ${store.tags.includes(snapshot) ? `--snapshot ${snapshot} ` : ""}${quote(sql())}`, "copy as mopd query"),
        copier(() => curlOf("samples", { store: params.store || 0, where, order: params.order || "", limit: PAGE }), "copy as curl"),
        h("button", { class: "quiet", type: "button", onclick: () => go("sql", "", { store: params.store, q: sql() }) }, "edit as a query"))));
}

function columnPicker(store, columns) {
  return h("details", { class: "picker" }, h("summary", {}, "columns"),
    h("div", { class: "columns" }, store.columns.map((c) => h("label", { title: c.doc },
      h("input", { type: "checkbox", checked: columns.includes(c.name), onchange: (e) => {
        const next = e.target.checked ? [...columns, c.name] : columns.filter((n) => n !== c.name);
        adjust({ cols: next.join(",") });
      } }), c.name, c.unit ? h("small", {}, ` ${c.unit}`) : null))));
}

function head(store, params, columns, histograms) {
  return h("thead", {}, h("tr", {}, columns.map((name) => {
    const meta = store.columns.find((c) => c.name === name), order = params.order || "";
    const sorted = order === name ? "ascending" : order === `-${name}` ? "descending" : "none";
    const next = sorted === "none" ? `-${name}` : sorted === "descending" ? name : "";
    return h("th", { scope: "col", "aria-sort": sorted, class: meta.kind === "word" ? "word" : "" },
      h("button", { class: "sort", title: `${meta.doc}${meta.unit ? ` (${meta.unit})` : ""}`, onclick: () => adjust({ order: next, page: "" }) },
        TITLES[name] || name, meta.unit && FIRST.concat(THEN).includes(name) ? h("small", {}, ` ${meta.unit}`) : null, { ascending: " ▲", descending: " ▼", none: "" }[sorted]),
      histograms && histograms[name] && name !== "uid" ? histogram(histograms[name], name,
        conditions(params).some((c) => c.c === name), (c) => adjust(withCondition(params, c))) : h("div", { class: "histogram none" }));
  }).toSpliced(TEXT_AT, 0, h("th", { scope: "col", class: "word" }, "prompt"), h("th", { scope: "col", class: "word" }, "answer"))));
}

export function contextOf(params) {
  const { store, f, w, order, cols } = params;
  return { store, f, w, order, cols };
}

export async function samplesPage(main, { params }, { store, signal }) {
  const columns = chosenColumns(store, params), where = whereOf(params);
  const page = whole(params.page);
  const asked = { store: params.store || 0, where, order: params.order || "", f: params.f || "[]" };
  let found;
  try { found = await ask("samples", { ...asked, limit: PAGE, offset: page * PAGE }, { signal }); } catch (error) {
    if (error.name === "AbortError" || !where) throw error;
    put(main, h("h1", { class: "unseen" }, "Samples"), filterBar(store, params, null),
      h("p", { class: "damage", role: "alert" }, error.message), h("p", { class: "empty" }, "Mend the filter above, or clear it."));
    document.getElementById("where").focus();
    return { keys: { f: ["edit the filter", () => document.getElementById("where").focus()], c: ["clear the filter", () => adjust({ w: "", f: "", page: "", at: "" })] } };
  }
  const rows = found.rows.map((row) => Object.fromEntries(found.columns.map((c, i) => [c, row[i]])));
  const body = h("tbody", {});
  const grid = h("table", { class: "rollouts", "aria-label": "Samples" }, head(store, params, columns, null), body);
  let cursor = Math.min(rows.length - 1, Math.max(0, whole(params.at) - page * PAGE));
  const open = (i) => address("sample", rows[i].uid, { ...contextOf(params), at: page * PAGE + i });
  const kinds = Object.fromEntries(store.columns.map((c) => [c.name, c.kind]));
  const cellOf = (row, i, name) => {
    const text = name === "uid" ? row.uid.slice(0, 10) : cell(row[name], kinds[name]);
    if (name === "uid") return h("a", { href: open(i) }, text);
    if (name !== "group_id" && name !== "prompt_id") return short(text, 40);
    const group = name === "group_id" ? { group: row.group_id, stage: row.stage } : {};
    return h("a", { href: address("prompt", row.prompt_id, { store: params.store, ...group }) }, short(text, 28));
  };
  body.addEventListener("click", (e) => {
    const row = e.target.closest("tr");
    if (row && !e.target.closest("a, button") && getSelection().isCollapsed) location.hash = open(Number(row.dataset.i));
  });
  body.append(...rows.map((row, i) => h("tr", { "data-i": i, "data-uid": row.uid }, columns.map((name, n) =>
    h(n === 0 ? "th" : "td", { scope: n === 0 ? "row" : null, class: kinds[name] === "word" ? "word" : "", "data-c": name }, cellOf(row, i, name)),
  ).toSpliced(TEXT_AT, 0, h("td", { class: "word text" }), h("td", { class: "word text" })))));
  // What speaks of a sample's place among others comes when the server has read all of them.
  const complete = async () => {
    const again = await ask("samples", { ...asked, limit: PAGE, offset: page * PAGE, whole: 1 }, { signal });
    again.rows.forEach((values, i) => {
      const row = Object.fromEntries(again.columns.map((c, n) => [c, values[n]]));
      if (!rows[i] || row.uid !== rows[i].uid) return;
      body.children[i].querySelectorAll("[data-c]").forEach((node) => put(node, cellOf(row, i, node.dataset.c)));
    });
  };
  const mark = (i) => {
    if (!rows.length) return;
    cursor = Math.min(rows.length - 1, Math.max(0, i));
    body.querySelectorAll("tr.cursor").forEach((r) => r.classList.remove("cursor"));
    const row = body.children[cursor];
    row.classList.add("cursor");
    row.scrollIntoView({ block: "nearest" });
    say(`${cursor + 1}: ${row.querySelector("th").textContent}`);
  };
  const pages = Math.max(1, Math.ceil(found.total / PAGE));
  const turn = (to) => adjust({ page: to ? String(to) : "", at: "" });
  const pager = h("nav", { class: "row pager", "aria-label": "Pages of the table" },
    h("strong", { id: "matching" }, `${count(found.total)} of ${count(store.samples)} samples`),
    h("button", { disabled: page === 0, onclick: () => turn(page - 1) }, "← previous"),
    h("span", {}, `page ${count(page + 1)} of ${count(pages)}`),
    h("button", { disabled: page >= pages - 1, onclick: () => turn(page + 1) }, "next →"),
    select("sort", params.order || "", [["", isStatic() ? "as exported" : "as committed"], ...store.columns.flatMap((c) => [[`-${c.name}`, `${c.name} ▼`], [c.name, `${c.name} ▲`]])],
      (order) => adjust({ order, page: "" })), columnPicker(store, columns));
  put(main, h("h1", { class: "unseen" }, "Samples"), filterBar(store, params, () => found.sql),
    isStatic() ? null : searchPanel(store, params, where), pager,
    h("div", { class: "scroll tall" }, grid), rows.length ? null : h("p", { class: "empty" }, "No sample matches. Remove a condition above."));
  mark(cursor);
  const reading = h("small", { class: "reading-all" }, found.whole === false ? `reading the metadata of all ${count(found.total)}…` : "");
  pager.append(reading);
  ask("histograms", { ...asked, columns: columns.filter((c) => c !== "uid").join(",") }, { signal })
    .then((histograms) => {
      grid.querySelector("thead").replaceWith(head(store, params, columns, histograms));
      reading.remove();
      return found.whole === false ? complete() : null;
    }).catch((error) => { if (error.name !== "AbortError") put(reading, error.message); });
  ask("excerpts", { store: asked.store, uids: rows.map((r) => r.uid).join(",") }, { signal }).then((texts) => {
    for (const row of body.children) {
      const text = texts[row.dataset.uid];
      if (!text) continue;
      const [prompt, answer] = row.querySelectorAll("td.text");
      prompt.textContent = short((text.prompt || "").replace(/\s+/g, " "), 60);
      answer.textContent = text.error ? "cannot be read" : short(text.response.replace(/\n/g, "⏎"), 80);
      answer.classList.toggle("damage", Boolean(text.error));
      answer.title = text.error || "";
    }
  }, () => {});
  return {
    keys: {
      j: ["next sample", () => mark(cursor + 1)], ArrowDown: ["next sample", () => mark(cursor + 1)],
      k: ["previous sample", () => mark(cursor - 1)], ArrowUp: ["previous sample", () => mark(cursor - 1)],
      Enter: ["open the sample", () => { if (rows.length) location.hash = open(cursor); }],
      g: ["its group", () => { if (rows.length) location.hash = address("prompt", rows[cursor].prompt_id, { store: params.store, group: rows[cursor].group_id, stage: rows[cursor].stage }); }],
      f: ["edit the filter", () => document.getElementById("where").focus()],
      "/": ["search in text", () => document.getElementById("search")?.focus()],
      ".": ["next page", () => { if (page < pages - 1) turn(page + 1); }],
      ",": ["previous page", () => { if (page > 0) turn(page - 1); }],
      c: ["clear the filter", () => adjust({ w: "", f: "", page: "", at: "" })],
    },
  };
}
