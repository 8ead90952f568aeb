// The first page: teachers correct the student, version by version, beside the curve of reverse KL.

import { isStatic, once } from "./api.js";
import { card } from "./card.js";
import { chart } from "./chart.js";
import { h, put, say, select } from "./dom.js";
import { count, number, percent, short, shown } from "./format.js";
import { runState } from "./run_state.js";
import { unpack } from "./signals.js";
import { address, adjust, go, whole } from "./state.js";

const PENS = 8;
const PLAY_MS = 1300;
const SMALLEST = 0.58, GROWTH = 0.07, LARGEST_NATS = 8; // size of a word, in the size of the answer's letters

const pen = (n) => `var(--pen-${n % PENS})`;
const WORD = 24; // characters of a word
const word = (text) => short(shown(text), WORD).replace(/^ +$/, (spaces) => "␣".repeat(spaces.length)) || "∅";
const many = (n, one, more) => `${count(n)} ${n === 1 ? one : more}`;

// The table of samples of an iteration, the most corrected first.
function samplesOf(stage, iteration, params) {
  const conditions = [{ c: "stage", in: [stage] }, { c: "iteration", ge: iteration, lt: iteration + 1 }];
  return { store: params.store, f: JSON.stringify(conditions), order: "-kl" };
}

function correction(fix, piece, teacher, colour, open) {
  const size = SMALLEST + GROWTH * Math.min(fix.nats, LARGEST_NATS), nats = `${number(fix.nats, 1)} nat`;
  const own = fix.word === null ? "" : `, ${teacher} would write ${word(fix.word)}, with ${percent(fix.p)}`;
  return h("button", { class: "fix", type: "button", onclick: open, title: `${nats} below the student's log-prob`,
    "aria-label": `the student wrote ${word(piece)}${own}; ${nats}` },
  h("span", { class: "own", style: { color: colour, fontSize: `${size}em` } }, fix.word === null ? `−${number(fix.nats, 1)}` : word(fix.word)),
  h("s", { style: { textDecorationColor: colour } }, word(piece)));
}

function answerText(answer, colour, open) {
  const fixes = new Map(answer.fixes.map((fix) => [fix.at, fix]));
  const left = (n) => (n ? h("small", {}, ` … ${many(n, "token", "tokens")} … `) : null);
  return h("p", { class: "marked", dir: "auto" }, left(answer.before), answer.pieces.map((piece, i) => {
    const at = answer.start + i, fix = fixes.get(at);
    return fix ? correction(fix, piece, answer.teacher, colour, () => open(answer, at)) : piece;
  }), left(answer.after));
}

function article(answer, n, params, open) {
  const colour = pen(n);
  const followed = answer.is_same_prompt ? "the prompt that is followed" : "another prompt: this version was not asked the followed one";
  return h("article", { class: "pen", style: { borderColor: colour } },
    h("h2", {}, h("span", { style: { color: colour } }, answer.teacher), h("small", {}, ` ${answer.domain}`)),
    h("pre", { class: "quoted", dir: "auto" }, answer.prompt),
    answer.error ? h("p", { class: "damage" }, `This answer cannot be read: ${answer.error}`) : answerText(answer, colour, open),
    h("p", { class: "where" }, answer.error ? null : `${answer.fixes.length ? many(answer.fixes.length, "correction", "corrections") : "nothing to correct"} · `,
      `reverse KL ${number(answer.answer_kl, 2)} nat/token · ${followed} · `,
      h("a", { href: address("sample", answer.uid, { store: params.store, teacher: answer.teacher, t: answer.worst }) }, "open the sample")),
    answer.note ? h("p", { class: "where" }, `Note: ${answer.note}.`) : null);
}

function list(corrected, n, params) {
  const colour = pen(n);
  return h("section", { "aria-label": `Corrected most by ${corrected.teacher}` }, h("h3", { style: { color: colour } }, corrected.teacher),
    corrected.error ? h("p", { class: "damage" }, corrected.error) : null,
    corrected.lines.length ? h("ol", { class: "lines" }, corrected.lines.map((line) => h("li", {}, h("a", {
      href: address("samples", "", { store: params.store, f: JSON.stringify([{ c: "uid", in: line.uids }]) }),
      title: "Show the samples with this correction",
    }, h("s", { class: "mono" }, word(line.token)), h("span", { class: "unseen" }, " becomes "), h("span", { "aria-hidden": "true" }, " → "),
    h("span", { class: "mono", style: { color: colour } }, line.word === null ? "?" : word(line.word)),
    h("small", {}, `${count(line.count)} × · ${number(line.nats, 1)} nat`))))) : h("p", { class: "empty" }, "Nothing to correct."),
    h("p", { class: "where" }, `${many(corrected.fixes, "correction", "corrections")} in ${count(corrected.looked_at)} of ${count(corrected.answers)} answers${corrected.note ? `; ${corrected.note}` : ""}`));
}

// The card of a token over the page.
async function openCard(answer, at, params, store) {
  const aside = h("div", { class: "card" }, h("p", { class: "empty" }, "reading the sample…"));
  const box = h("dialog", { class: "token", "aria-label": "Token", onclose: () => box.remove() }, aside,
    h("form", { method: "dialog", class: "row" }, h("a", { href: address("sample", answer.uid, { store: params.store, teacher: answer.teacher, t: at }) }, "open the sample"),
      h("button", { autofocus: true }, "close")));
  document.body.append(box);
  box.showModal();
  try {
    const sample = await once("sample", { store: params.store || 0, uid: answer.uid }, store.digest);
    if (sample.damage) throw new Error(sample.damage);
    card(aside, unpack(sample), at, { params, uid: answer.uid, store });
  } catch (error) { put(aside, h("p", { class: "damage", role: "alert" }, error.message)); }
}

export async function homePage(main, { params }, { store }) {
  const query = { store: params.store || 0, stage: params.stage || "" };
  const [run, state] = await Promise.all([once("home", query, store.digest), isStatic() ? null : once("state", { store: query.store }, store.digest)]);
  const title = [state ? runState(state, store, params) : null, h("h1", {}, "Teachers correcting the student")];
  if (!run.iterations.length) {
    put(main, title, h("p", { class: "lead" }, "No teacher has scored an answer yet. ", store.follow ? "This page fills when one has." : null),
      h("p", {}, h("a", { href: address("samples", "", { store: params.store }) }, `all ${count(store.samples)} samples`)));
    return { keys: {} };
  }
  const iterations = run.iterations.map((i) => i.iteration), last = iterations.length - 1;
  let at = iterations.indexOf(whole(params.v));
  if (!params.v || at < 0) at = store.follow ? last : 0;
  const order = new Map(run.teachers.map((t, n) => [t.name, n]));
  const answers = h("div", { class: "pens" }), lists = h("div", { class: "lists" }), where = h("output", { class: "version", for: "version" });
  const heading = h("h2", {});
  const slider = h("input", { id: "version", type: "range", min: 0, max: last, step: 1, value: String(at), "aria-label": "Policy version",
    oninput: (e) => { stop(); show(Number(e.target.value)); } });
  slider.value = String(at);
  const lines = run.teachers.map((t) => ({ name: t.name, x: t.curve.map((p) => p.iteration), y: t.curve.map((p) => p.kl),
    low: t.curve.map((p) => (p.kl_ci === null ? null : p.kl - p.kl_ci)), high: t.curve.map((p) => (p.kl_ci === null ? null : p.kl + p.kl_ci)),
    ink: (n) => `--pen-${n % PENS}` }));
  const curve = chart(lines, { title: "Reverse KL to each teacher", unit: "nat/token, 95 % interval", x: "iteration", height: 260,
    marks: [{ x: iterations[at], title: "" }], onpick: (x) => go("samples", "", samplesOf(run.stage, x, params)) });
  const table = h("a", {}, "samples of this iteration");
  const play = h("button", { type: "button", onclick: () => (timer ? stop() : start()) }, "▶ play");
  let timer = 0, drawing = 0;

  function stop() {
    clearInterval(timer);
    timer = 0;
    play.textContent = "▶ play";
  }

  function start() {
    if (at === last) show(0);
    play.textContent = "❚❚ pause";
    timer = setInterval(() => { if (at >= last) stop(); else show(at + 1); }, PLAY_MS);
  }

  const open = (answer, position) => { stop(); openCard(answer, position, params, store); };

  async function show(to, { quiet = false } = {}) {
    const own = (drawing += 1), { iteration, version } = run.iterations[to];
    at = to;
    slider.value = String(to);
    slider.setAttribute("aria-valuetext", `version ${version}, iteration ${iteration}`);
    put(where, `policy v${version} · iteration ${iteration} of ${iterations[last]}`);
    curve.markAt(iteration);
    table.setAttribute("href", address("samples", "", samplesOf(run.stage, iteration, params)));
    put(heading, `What each teacher corrected most in iteration ${iteration}`);
    if (!quiet) adjust({ v: iteration }, { keep: true });
    const part = { ...query, stage: run.stage, iteration };
    const fill = async (name, target, draw) => {
      try {
        const rows = await once(name, part, store.digest);
        if (own === drawing) put(target, rows.map((row) => draw(row, order.get(row.teacher))));
      } catch (error) { if (own === drawing) put(target, h("p", { class: "damage", role: "alert" }, error.message)); }
    };
    await fill("corrections", answers, (row, n) => article(row, n, params, open));
    if (own === drawing && !quiet) say(`iteration ${iteration}: ${answers.querySelectorAll(".fix").length} corrections`);
    fill("corrected", lists, (row, n) => list(row, n, params));
  }

  await show(at, { quiet: true }); // before the page changes, so that a live one does not flicker
  put(main, title,
    h("p", { class: "lead" }, `Struck through: what the student wrote and a teacher gives at least ${run.min_nats} nat less. Above it: what that teacher would have written, larger where it dislikes the token more. Click a correction for both sides' candidates.`),
    h("div", { class: "row controls" }, run.stages.length > 1 && !isStatic() ? select("stage", run.stage, run.stages, (stage) => adjust({ stage, v: "" })) : null,
      h("label", { class: "unseen", for: "version" }, "Policy version"), last ? [play, slider] : null, where, table),
    h("div", { class: "redpen" }, answers, h("aside", { class: "kl" }, curve, h("p", { class: "where" }, "Click the curve for the samples of an iteration."))),
    heading, h("p", { class: "where" }, "Each line shows its samples."), lists);
  const move = (step) => { stop(); show(Math.min(last, Math.max(0, at + step))); };
  return {
    close: () => { stop(); document.querySelector("dialog.token")?.remove(); },
    keys: {
      l: ["next version", () => move(1)], ArrowRight: ["next version", () => move(1)],
      h: ["previous version", () => move(-1)], ArrowLeft: ["previous version", () => move(-1)],
      p: ["play or pause", () => (timer ? stop() : start())],
      t: ["samples of this iteration", () => { location.hash = table.getAttribute("href"); }],
    },
  };
}
