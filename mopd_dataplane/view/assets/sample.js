// One sample: the strip of tokens, every teacher over one text, the card of a token, a chart by position.

import { twoRows } from "./alignment.js";
import { ask, isStatic, once } from "./api.js";
import { card } from "./card.js";
import { chart } from "./chart.js";
import { legend, paint } from "./colours.js";
import { copier, h, oneStop, put, say, select } from "./dom.js";
import { clock, count, number, shown, signed } from "./format.js";
import { labelPanel } from "./labels.js";
import { minimap } from "./minimap.js";
import { question } from "./question.js";
import { readingView } from "./reading.js";
import { contextOf, searchOf } from "./samples.js";
import { mostDisliked, nextSurprise, ratio, signalsOf, tracksOf, unpack } from "./signals.js";
import { literal, sources } from "./sources.js";
import { adjust, address, redraw, whereOf, whole } from "./state.js";
import { Strip } from "./strip.js";

function facts(row, params) {
  const items = [
    ["domain", row.domain], ["stage", `${row.stage} · iteration ${row.iteration}`],
    ["written by", row.policy === "reference" ? "reference" : `${row.policy} v${row.policy_version_first}${row.policy_version_last > row.policy_version_first ? ` to v${row.policy_version_last}` : ""}`],
    ["reward", `${number(row.reward)}${Number.isFinite(row.advantage) && row.group_size > 1 ? `, advantage ${signed(row.advantage)}` : ""}`], ["reverse KL", `${signed(row.kl, 3)} nat/token`],
    ["tokens", `${count(row.response_len)}, ${count(row.loss_tokens)} trained`], ["finish", row.finish_reason],
    ["interruptions", row.interruptions ? `${row.interruptions}, resumed ${row.resume}` : "none"],
    ["sampled", clock(row.created_at)],
  ];
  return h("dl", { class: "facts" }, items.map(([k, v]) => h("div", {}, h("dt", {}, k), h("dd", {}, v))),
    h("div", {}, h("dt", {}, "prompt"), h("dd", {}, h("a", { href: address("prompt", row.prompt_id, { store: params.store }) }, row.prompt_id))));
}

function flagsOf(row, store) {
  return store.flags.filter((flag) => row[flag]).map((flag) => h("span", { class: "chip flag" }, flag.replace(/_/g, " ")));
}

function legendOf(signal) {
  const steps = signal.scale === "kinds" ? signal.kinds : legend(signal.scale, signal.edges);
  return h("div", { class: "legend", role: "img", "aria-label": `Scale of ${signal.title}${signal.unit ? ` in ${signal.unit}` : ""}` },
    steps.map(([level, text]) => h("span", { style: { backgroundColor: paint(signal.scale, level) } }, text)),
    signal.unit ? h("small", {}, signal.scale === "diverging" && signal.unit === "nat" ? "nat; blue: the teacher liked it more" : signal.unit) : null);
}

function trackNames(tracks) {
  return h("ul", { class: "tracks", "aria-label": "Tracks under the text, from top" },
    tracks.map((track, i) => h("li", {}, h("small", {}, `${i + 1}`), ` ${track.name}`)));
}

function missing(data) {
  const troubles = data.teachers.flatMap((t) => Object.entries(t.errors || {}).map(([kind, why]) => `${t.name}, ${kind}: ${why}`));
  const absent = []; // usual for imports and for samples that wait: nothing is wrong
  if (!data.sampler) absent.push("no sampler log-probs were recorded, so there is no log-ratio");
  if (!data.teachers.length) absent.push("no teacher has scored this sample");
  const items = [...troubles.map((t) => h("li", { class: "damage" }, t)), ...absent.map((t) => h("li", { class: "where" }, t))];
  return items.length ? h("ul", { "aria-label": "What is missing" }, items) : null;
}

function statement(uid) {
  return `select * from samples join tokens using (uid)
left join (select uid, list({teacher: teacher, kind: kind, kl: mean_reverse_kl}) as scored from scores group by uid) using (uid)
where uid = ${literal(uid)}`;
}

async function neighbour(params, step, signal) {
  const at = whole(params.at);
  if (!params.at || at + step < 0) return null;
  const found = await ask("samples", { store: params.store || 0, where: whereOf(params), f: params.f || "[]", order: params.order || "", limit: 1, offset: at + step, ...(isStatic() ? {} : searchOf(params)) }, { signal });
  return found.rows.length ? address("sample", found.rows[0][found.columns.indexOf("uid")], { ...contextOf(params), at: at + step, s: params.s, teacher: params.teacher }) : null;
}

// What compares the sample with others comes later where the server has not read all of them.
function complete(sample, params, signal, then) {
  if (sample.whole !== false) return;
  ask("row", { store: params.store || 0, uid: sample.uid }, { signal }).then((row) => {
    Object.assign(sample.row, row);
    sample.whole = true;
    then();
  }).catch((error) => { if (error.name !== "AbortError") say(error.message); });
}

export async function samplePage(main, { id, params }, { store, signal: stop }) {
  const sample = await once("sample", { store: params.store || 0, uid: id }, store.digest);
  const head = h("header", { class: "row" });
  const textOf = async (part) => (isStatic() ? { answer: sample.pieces.join(""), prompt: sample.prompt_pieces } : await ask("text", { store: params.store || 0, uid: id }))[part];
  const title = () => put(head, h("h1", {}, "Sample ", h("code", {}, id.slice(0, 10))), flagsOf(sample.row, store), copier(id, "copy uid"),
    sample.damage ? null : [copier(() => textOf("answer"), "copy answer"), copier(() => textOf("prompt"), "copy prompt")]);
  title();
  const tabs = h("nav", { class: "row", "aria-label": "About this sample" },
    h("a", { href: address("prompt", sample.row.prompt_id, { store: params.store, group: sample.row.group_id, stage: sample.row.stage }) }, "group"),
    h("a", { href: address("life", id, { ...contextOf(params), at: params.at }) }, "life"),
    h("a", { href: address("samples", "", { ...contextOf(params), at: params.at, page: Math.floor(whole(params.at) / 50) || "" }) }, "back to the table"));
  const prompt = question(sample.prompt, sample.prompt_pieces || sample.prompt.text);
  if (sample.damage) {
    put(main, head, tabs, facts(sample.row, params), prompt, h("p", { class: "damage", role: "alert" }, `The tokens cannot be read: ${sample.damage}`));
    complete(sample, params, stop, title);
    return { keys: {} };
  }
  const data = unpack(sample), tracks = tracksOf(data);
  const views = h("nav", { class: "row views", "aria-label": "Ways to read" }, [["", "tokens"], ["read", "reading"]].map(([view, text]) =>
    h("a", { href: address("sample", id, { ...params, view }), class: (params.view || "") === view ? "chip on" : "chip", "aria-current": (params.view || "") === view ? "true" : null }, text)));
  if (params.view === "read") {
    put(main, head, tabs, facts(data.row, params), missing(data), views, readingView(data), isStatic() ? null : labelPanel(store, id, sample.labels, params));
    complete(sample, params, stop, title);
    return { keys: { v: ["token by token", () => adjust({ view: "" })], u: ["back to the table", () => { location.hash = tabs.lastChild.getAttribute("href"); }] } };
  }
  const scorers = data.teachers.filter((t) => t.logprob || t.topk);
  let teacher = scorers.find((t) => t.name === params.teacher) || scorers[0] || null;
  let signals = signalsOf(data, teacher);
  let signal = signals.find((s) => s.key === params.s) || signals[0];
  let at = params.t ? Math.min(data.length - 1, whole(params.t)) : mostDisliked(data, teacher);
  const aside = h("aside", { class: "card", "aria-label": "Token", "aria-live": "polite" });
  const controls = h("div", { class: "row controls" }), plot = h("div", {});
  const strip = new Strip({ data, signal, tracks, selected: at, onselect: (i) => choose(i) });
  const ratios = teacher ? ratio(data, teacher) : null;
  const map = ratios ? minimap(data, teacher.name, ratios, (i) => choose(i)) : null;
  if (map) oneStop(map, ".tick");
  const aligned = twoRows(data, teacher, (i) => choose(i));
  const help = h("p", { id: "strip-help", class: "unseen" }, "h and l move by token, n and p to the next and previous surprising one, brackets change the teacher");

  function choose(i, { quiet = false } = {}) {
    at = Math.min(data.length - 1, Math.max(0, i));
    strip.choose(at);
    if (map) map.moveTo(at);
    if (aligned) aligned.moveTo(at);
    card(aside, data, at, { params, uid: id, store });
    if (!quiet) {
      adjust({ t: at }, { keep: true });
      say(`token ${at}, ${shown(data.pieces[at])}, ${signal.title} ${Number.isNaN(signal.values[at]) ? "none" : number(signal.values[at], 2)}`);
    }
  }

  function control() {
    put(controls,
      select("signal", signal.key, signals.map((s) => [s.key, s.title]), (key) => adjust({ s: key, t: at })),
      scorers.length ? select("teacher", teacher.name, scorers.map((t) => t.name), (name) => adjust({ teacher: name, t: at })) : null, legendOf(signal));
  }

  function draw() {
    const x = Array.from({ length: data.length }, (_, i) => i);
    const versions = data.spans.filter((s) => s.start > 0).map((s) => ({ x: s.start, title: `v${s.version}` }));
    const sameSignal = scorers.map((t) => ({ t, s: signalsOf(data, t).find((s) => s.key === signal.key && s.teacher) })).filter((f) => f.s);
    const lines = sameSignal.length ? sameSignal.map((f) => ({ name: f.t.name, x, y: Array.from(f.s.values) }))
      : [{ name: signal.title, x, y: Array.from(signal.values) }];
    put(plot, chart(lines, { title: `${signal.title} by position`, unit: signal.unit, x: "token", height: 150, marks: versions, onpick: (i) => choose(i) }));
  }

  control();
  put(main, head, tabs, facts(data.row, params), missing(data), prompt, views, controls, help,
    h("div", { class: "reader" }, h("div", { class: "reading" }, map, tracks.length ? trackNames(tracks) : null, strip.root, aligned ? aligned.root : null, plot), aside),
    isStatic() ? null : labelPanel(store, id, sample.labels, params), sources("sample", { store: params.store || 0, uid: id }, statement(id), params));
  complete(sample, params, stop, () => {
    title();
    signals = signalsOf(data, teacher);
    if (params.s && params.s !== signal.key && signals.some((s) => s.key === params.s)) redraw(); else control();
  });
  draw();
  strip.layout();
  choose(at, { quiet: true });
  const surprise = (step) => {
    const next = nextSurprise(signal.values, at, step);
    if (next === null) say("no further surprising token"); else choose(next);
  };
  const turn = (step) => {
    if (!scorers.length) return;
    const n = (scorers.indexOf(teacher) + step + scorers.length) % scorers.length;
    adjust({ teacher: scorers[n].name, t: at });
  };
  const move = async (step) => {
    const next = await neighbour(params, step, stop);
    if (next) location.hash = next; else say("no further sample");
  };
  return {
    close: () => strip.close(),
    keys: {
      l: ["next token", () => choose(at + 1)], ArrowRight: ["next token", () => choose(at + 1)],
      h: ["previous token", () => choose(at - 1)], ArrowLeft: ["previous token", () => choose(at - 1)],
      n: ["next surprising token", () => surprise(1)], p: ["previous surprising token", () => surprise(-1)],
      "]": ["next teacher", () => turn(1)], "[": ["previous teacher", () => turn(-1)],
      j: ["next sample of the table", () => move(1)], k: ["previous sample of the table", () => move(-1)],
      v: ["read it as a conversation", () => adjust({ view: "read" })],
      s: ["choose a signal", () => controls.querySelector("select").focus()],
      g: ["its group", () => { location.hash = address("prompt", data.row.prompt_id, { store: params.store, group: data.row.group_id, stage: data.row.stage }); }],
      i: ["its life", () => { location.hash = address("life", id, { store: params.store }); }],
      u: ["back to the table", () => { location.hash = tabs.lastChild.getAttribute("href"); }],
      "/": ["search in text", () => { location.hash = address("samples", "", { ...contextOf(params), focus: "search" }); }],
    },
  };
}
