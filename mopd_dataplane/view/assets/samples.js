// The table of rollouts: histograms in the heads, filters as SQL, flags, sorting, paging, search in what was written.

import { ask, isStatic, stream } from "./api.js";
import { copier, h, oneStop, put, say, select } from "./dom.js";
import { cell, count, short } from "./format.js";
import { histogram } from "./histogram.js";
import { labelCounts } from "./labels.js";
import { searchBar, searchProgress } from "./search.js";
import { curlOf, quote } from "./sources.js";
import { adjust, address, asSql, conditions, go, whereOf, whole, withCondition } from "./state.js";
import { parts } from "./stores.js";
import { typed } from "./typed.js";

const PAGE = 50;
const TEXT_AT = 1; // prompt and answer stand behind this many columns
const FIRST = ["uid", "kl", "reward", "domain", "stage", "iteration", "policy_version_first", "response_len", "mean_logprob", "finish_reason"];
const TITLES = { policy_version_first: "version", response_len: "length", mean_logprob: "mean log p", finish_reason: "finish" };

// The columns of the address, or those of FIRST that have a value on this page. Columns of teachers are among them where
// a sample has several teachers. The column of the sort and those of conditions are always there.
function shownColumns(store, params, rows) {
  const has = (name) => store.columns.some((c) => c.name === name), key = (params.order || "").replace(/^-/, "");
  const chosen = (params.cols || "").split(",").filter(has);
  const ofTeachers = rows.some((row) => row.teachers > 1) ? store.columns.map((c) => c.name).filter((n) => n.startsWith("kl_") && n !== "kl_spread").slice(0, 4) : [];
  const filtered = new Set(conditions(params).map((c) => c.c));
  const filled = (name) => !rows.length || filtered.has(name) || name === key || rows.some((row) => row[name] !== null && row[name] !== undefined);
  const columns = chosen.length ? chosen : [...FIRST, ...ofTeachers].filter((name) => has(name) && filled(name));
  return has(key) && !columns.includes(key) ? columns.toSpliced(1, 0, key) : columns;
}

// A chip for every label that samples bear; a click filters by it.
async function showLabels(place, params) {
  put(place, (await labelCounts(params.store || 0)).map(([label, n]) => {
    const sql = `uid in (select uid from labelled where label = '${label.replace(/'/g, "''")}')`;
    const on = (params.w || "") === sql;
    return h("button", { class: on ? "chip on" : "chip", "aria-pressed": String(on), title: `${count(n)} samples bear this label`,
      onclick: () => adjust({ w: on ? "" : sql, page: "", at: "" }) }, `🏷 ${short(label, 24)}`);
  }));
}

// What was typed into the filter, as parameters of the address.
function ofTyped(text) {
  const { w, q, order } = typed(text);
  return { w, f: "", page: "", at: "", ...(q === undefined ? {} : { q, sk: "" }), ...(order === undefined ? {} : { order }) };
}

// The conditions of the table: SQL that a person typed, a search, what histograms made, flags and labels. refusal,
// searchRefusal: what is wrong with the SQL and with the search.
function filterBar(store, params, { refusal, searchRefusal }) {
  const where = whereOf(params);
  const box = h("textarea", {
    id: "where", rows: 1, spellcheck: "false", "aria-label": "Filter as SQL", "aria-invalid": refusal ? "true" : null, "aria-describedby": refusal ? "refusal" : null,
    placeholder: "all samples; or SQL: reward < 1 and regexp_matches(response, '9{3}') order by kl desc",
    disabled: isStatic(), onkeydown: (e) => {
      if (e.key === "Enter" && !e.shiftKey) { e.preventDefault(); adjust(ofTyped(box.value.trim())); }
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
  const bar = h("div", { class: "row chips", role: "toolbar", "aria-label": "Conditions; arrows move" }, chips, chips.length ? h("span", { class: "bar-rule" }) : null, flags, labels);
  if (!isStatic()) showLabels(labels, params).then(() => oneStop(bar, "button"));
  oneStop(bar, "button");
  return h("section", { class: "filters", "aria-label": "Filters" },
    h("div", { class: "row" }, h("label", { class: "prefix", for: "where" }, "where"), box,
      where ? h("button", { class: "quiet", onclick: () => adjust({ w: "", f: "", page: "", at: "" }) }, "clear") : null),
    refusal ? h("p", { id: "refusal", class: "damage refusal", role: "alert" }, h("span", { class: "where" }, "The table is shown without this filter. "), refusal) : null,
    isStatic() ? null : searchBar(params, searchRefusal), bar);
}

function statementOf(store, params, sql) {
  const { snapshot } = parts(params.store);
  return h("details", {}, h("summary", {}, "SQL and curl of this table"),
    h("pre", { class: "sql" }, sql),
    h("div", { class: "row" }, copier(sql, "copy SQL"),
      copier(() => `mopd query ${quote(store.uri)} ${store.tags.includes(snapshot) ? `--snapshot ${snapshot} ` : ""}${quote(sql)}`, "copy as mopd query"),
      copier(() => curlOf("samples", { store: params.store || 0, where: whereOf(params), order: params.order || "", limit: PAGE, ...searchOf(params) }), "copy as curl"),
      h("button", { class: "quiet", type: "button", onclick: () => go("sql", "", { store: params.store, q: sql }) }, "edit as a query")));
}

// The condition of the table as keys of a job: for a stage of this store's job, and for one that trains on this store.
function trainOn(store, params) {
  const where = whereOf(params);
  if (!where) return null;
  const own = `plan = { where = ${JSON.stringify(where)} }`;
  const others = `data = { from = [{ store = ${JSON.stringify(store.uri)}, where = ${JSON.stringify(where)} }] }`;
  return h("details", {}, h("summary", {}, "train on this"),
    params.q ? h("p", {}, "A plan reads no text, so the search is not part of the condition.") : null,
    h("p", {}, "In a stage of this store's job:"), h("pre", { class: "sql" }, own), copier(own, "copy plan.where"),
    h("p", {}, "In a stage of another job, which reads the samples where they are:"), h("pre", { class: "sql" }, others), copier(others, "copy data.from"));
}

// The choice of columns, with a search; it stays open while columns are chosen. onpick(columns)
function columnPicker(store, columns, onpick) {
  let chosen = columns;
  const labels = store.columns.map((c) => h("label", { title: c.doc, "data-c": c.name },
    h("input", { type: "checkbox", checked: columns.includes(c.name), onchange: (e) => {
      chosen = e.target.checked ? [...chosen, c.name] : chosen.filter((name) => name !== c.name);
      onpick(chosen);
    } }), c.name, c.unit ? h("small", {}, ` ${c.unit}`) : null));
  const box = h("input", { type: "search", "aria-label": "Search columns", placeholder: `search ${store.columns.length} columns`, oninput: () => {
    const words = box.value.trim().toLowerCase().split(/\s+/);
    labels.forEach((label, i) => { label.hidden = !words.every((word) => `${store.columns[i].name} ${store.columns[i].doc}`.toLowerCase().includes(word)); });
  } });
  const picker = h("details", { class: "picker", ontoggle: () => { if (picker.open) box.focus(); }, onkeydown: (e) => {
    if (e.key !== "Escape") return;
    picker.open = false;
    picker.firstChild.focus();
  } }, h("summary", {}, "columns"), h("div", { class: "columns" }, box, labels,
    h("button", { class: "quiet", type: "button", onclick: () => adjust({ cols: "" }) }, "as at first")));
  return picker;
}

// Heads are one stop of the Tab key: arrows move between columns, and down to a histogram and back.
function head(store, params, columns, histograms) {
  const root = h("thead", {}, h("tr", {}, columns.map((name) => {
    const meta = store.columns.find((c) => c.name === name), order = params.order || "";
    const sorted = order === name ? "ascending" : order === `-${name}` ? "descending" : "none";
    const next = sorted === "none" ? `-${name}` : sorted === "descending" ? name : "";
    return h("th", { scope: "col", "aria-sort": sorted, class: meta.kind === "word" ? "word" : "" },
      h("button", { class: "sort", title: `${meta.doc}${meta.unit ? ` (${meta.unit})` : ""}`, onclick: () => adjust({ order: next, page: "", at: "" }) },
        TITLES[name] || name, meta.unit && FIRST.includes(name) ? h("small", {}, ` ${meta.unit}`) : null, { ascending: " ▲", descending: " ▼", none: "" }[sorted]),
      histograms[name] && name !== "uid" ? histogram(histograms[name], name,
        conditions(params).some((c) => c.c === name), (c) => adjust(withCondition(params, c))) : h("div", { class: "histogram none" }));
  }).toSpliced(TEXT_AT, 0, h("th", { scope: "col", class: "word" }, "prompt"), h("th", { scope: "col", class: "word" }, "answer"))));
  oneStop(root, ".sort");
  root.addEventListener("keydown", (e) => {
    if (e.key !== "ArrowDown" && e.key !== "ArrowUp") return;
    e.preventDefault();
    e.stopPropagation();
    e.target.closest("th").querySelector(e.key === "ArrowDown" ? ".histogram[tabindex]" : ".sort")?.focus();
  });
  return root;
}

export function contextOf(params) {
  const { store, f, w, q, sk, order, cols } = params;
  return { store, f, w, q, sk, order, cols };
}

// The search of the address, as requests name it.
export function searchOf(params) {
  return params.q ? { q: params.q, kind: params.sk || "text" } : {};
}

// The rows of a page. A condition or a search that is refused is left out and named.
async function readRows(main, request, params, signal) {
  let refusal = "", searchRefusal = "";
  for (;;) {
    try {
      const { store, where, q, kind } = request;
      if (q) await stream("search", { store, where, q, kind }, (item) => { if (item.error) throw Object.assign(new Error(item.error), { kind: item.kind }); searchProgress(main, item); }, signal);
      return { result: await ask("samples", request, { signal }), request, refusal, searchRefusal };
    } catch (error) {
      const without = whereOf({ ...params, w: "" });
      if (error.kind === "InputError" && request.q) { searchRefusal = error.message; delete request.q; delete request.kind; }
      else if (error.kind && params.w && request.where !== without) { refusal = error.message; request.where = without; }
      else throw error;
    }
  }
}

export async function samplesPage(main, { params }, { store, signal }) {
  const page = whole(params.page), context = contextOf(params);
  const { result, request, ...refusals } = await readRows(main, { store: params.store || 0, where: whereOf(params), order: params.order || "", f: params.f || "[]",
    limit: PAGE, offset: page * PAGE, ...(isStatic() ? {} : searchOf(params)) }, params, signal);
  const rows = result.rows.map((row) => Object.fromEntries(result.columns.map((c, i) => [c, row[i]])));
  const kinds = Object.fromEntries(store.columns.map((c) => [c.name, c.kind]));
  const histograms = {}, texts = {};
  let columns = shownColumns(store, params, rows);
  let cursor = Math.min(rows.length - 1, Math.max(0, whole(params.at) - page * PAGE));
  const open = (i) => address("sample", rows[i].uid, { ...context, at: page * PAGE + i, t: texts[rows[i].uid]?.hit?.position });
  const cellOf = (row, i, name) => {
    const text = name === "uid" ? row.uid.slice(0, 10) : cell(row[name], kinds[name]);
    if (name === "uid") return h("a", { href: open(i) }, text);
    if (name !== "group_id" && name !== "prompt_id") return short(text, 40);
    const group = name === "group_id" ? { group: row.group_id, stage: row.stage } : {};
    return h("a", { href: address("prompt", row.prompt_id, { store: params.store, ...group }) }, short(text, 28));
  };
  const textsOf = (row) => {
    const text = texts[row.uid];
    if (!text) return [h("td", { class: "word text" }), h("td", { class: "word text" })];
    const said = text.error ? "cannot be read" : text.hit ? `${text.hit.text}${text.hit.times > 1 ? ` (${count(text.hit.times)} times)` : ""}` : text.response;
    return [h("td", { class: "word text" }, short((text.prompt || "").replace(/\s+/g, " "), 60)),
      h("td", { class: `word text${text.error ? " damage" : ""}`, title: text.error || null }, short(said.replace(/\n/g, "⏎"), 80))];
  };
  const body = h("tbody", {}), grid = h("table", { class: "rollouts", "aria-label": "Samples" }, h("thead", {}), body);
  const scroll = h("div", { class: "scroll tall" }, grid);
  const drawHead = () => grid.tHead.replaceWith(head(store, params, columns, histograms));
  const drawRows = () => {
    put(body, rows.map((row, i) => h("tr", { "data-i": i, "data-uid": row.uid, class: i === cursor ? "cursor" : null }, columns.map((name, n) =>
      h(n === 0 ? "th" : "td", { scope: n === 0 ? "row" : null, class: kinds[name] === "word" ? "word" : "", "data-c": name }, cellOf(row, i, name)),
    ).toSpliced(TEXT_AT, 0, ...textsOf(row)))));
  };
  // The column of the sort is in view however narrow the window is.
  const showSorted = () => {
    const sorted = grid.querySelector("th[aria-sort=ascending], th[aria-sort=descending]");
    if (sorted) scroll.scrollLeft = Math.max(0, sorted.offsetLeft + sorted.offsetWidth - scroll.clientWidth);
  };
  const measure = async () => {
    const names = columns.filter((c) => c !== "uid" && !histograms[c]);
    if (names.length) Object.assign(histograms, await ask("histograms", { ...request, columns: names.join(",") }, { signal }));
    drawHead();
  };
  const pick = (next) => {
    columns = next.length ? next : shownColumns(store, { ...params, cols: "" }, rows);
    context.cols = next.join(",");
    adjust({ cols: context.cols }, { keep: true });
    drawHead();
    drawRows();
    measure().catch(() => {});
  };
  body.addEventListener("click", (e) => {
    const row = e.target.closest("tr");
    if (row && !e.target.closest("a, button") && getSelection().isCollapsed) location.hash = open(Number(row.dataset.i));
  });
  // What speaks of a sample's place among others comes when the server has read all of them.
  const complete = async () => {
    const again = await ask("samples", { ...request, whole: 1 }, { signal });
    again.rows.forEach((values, i) => {
      const row = Object.fromEntries(again.columns.map((c, n) => [c, values[n]]));
      if (rows[i] && row.uid === rows[i].uid) rows[i] = row;
    });
    drawRows();
  };
  const mark = (i) => {
    if (!rows.length) return;
    body.children[cursor].classList.remove("cursor");
    cursor = Math.min(rows.length - 1, Math.max(0, i));
    const row = body.children[cursor];
    row.classList.add("cursor");
    row.scrollIntoView({ block: "nearest" });
    say(`${cursor + 1}: ${row.querySelector("th").textContent}`);
  };
  const pages = Math.max(1, Math.ceil(result.total / PAGE));
  const turn = (to) => adjust({ page: to ? String(to) : "", at: "" });
  const reading = h("small", { class: "reading-all" }, result.whole === false ? `reading the metadata of all ${count(result.total)}…` : "");
  const choices = h("div", { class: "row pager" }, h("strong", { id: "matching" }, `${result.cut ? "the first " : ""}${count(result.total)} of ${count(store.samples)} samples`), reading, h("span", { class: "fill" }),
    select("sort", params.order || "", [["", isStatic() ? "as exported" : "newest first"], ...store.columns.flatMap((c) => [[`-${c.name}`, `${c.name} ▼`], [c.name, `${c.name} ▲`]])],
      (order) => adjust({ order, page: "", at: "" })), columnPicker(store, columns, pick));
  const pager = h("nav", { class: "row pager", "aria-label": "Pages of the table" },
    h("button", { disabled: page === 0, onclick: () => turn(page - 1) }, "← previous"),
    h("span", {}, `page ${count(page + 1)} of ${count(pages)}`),
    h("button", { disabled: page >= pages - 1, onclick: () => turn(page + 1) }, "next →"));
  drawHead();
  drawRows();
  put(main, h("h1", { class: "unseen" }, "Samples"), filterBar(store, params, refusals), choices,
    scroll, rows.length ? null : h("p", { class: "empty" }, "No sample matches. Remove a condition above."),
    pager, isStatic() ? null : [trainOn(store, params), statementOf(store, params, result.sql)]);
  if (refusals.refusal) document.getElementById("where").focus();
  else if (refusals.searchRefusal) document.getElementById("search").focus();
  if (params.at) mark(cursor);
  showSorted();
  measure().then(() => {
    reading.remove();
    showSorted();
    return result.whole === false ? complete() : null;
  }).catch((error) => { if (error.name !== "AbortError") put(reading, error.message); });
  ask("excerpts", { store: request.store, uids: rows.map((r) => r.uid).join(","), q: request.q, kind: request.kind }, { signal }).then((answer) => {
    Object.assign(texts, answer);
    drawRows();
    showSorted();
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
      c: ["clear filter and search", () => adjust({ w: "", f: "", q: "", sk: "", page: "", at: "" })],
    },
  };
}
