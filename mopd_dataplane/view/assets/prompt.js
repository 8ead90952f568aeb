// All answers to a prompt: one group side by side, or over policy versions; where they part; how two differ.

import { ask, numbers, once } from "./api.js";
import { chart } from "./chart.js";
import { diverging, legend, paint } from "./colours.js";
import { h, put, select, table } from "./dom.js";
import { count, number, shown, signed } from "./format.js";
import { question } from "./question.js";
import { sources } from "./sources.js";
import { adjust, address } from "./state.js";
import { about } from "./stores.js";

function text(answer, teacher) {
  const ratios = answer.ratios[teacher] ? numbers(answer.ratios[teacher]) : null;
  return h("p", { class: "answer mono" }, answer.pieces.map((piece, i) => h("span", {
    class: i === answer.leaves_at ? "t parts" : "t", title: ratios && !Number.isNaN(ratios[i]) ? `${signed(ratios[i])} nat` : null,
    style: ratios ? { backgroundColor: paint("diverging", diverging(ratios[i])) } : null,
  }, shown(piece), piece.includes("\n") ? h("br") : null)), answer.cut ? h("small", {}, ` … ${count(answer.cut)} more tokens`) : null);
}

// The policy that wrote an answer, with its version.
function policyOf(answers, uid) {
  const row = answers.find((a) => a.row.uid === uid)?.row;
  return !row || row.policy === "reference" ? "reference" : `${row.stage} v${row.policy_version_first}`;
}

// picked: the uids that are compared; null where there is one answer alone.
function answerCard(answer, teacher, params, picked) {
  const row = answer.row;
  return h("article", { class: "answered", "aria-label": `Answer ${row.uid.slice(0, 10)}` },
    h("header", { class: "row" }, h("a", { href: address("sample", row.uid, { store: params.store, teacher }) }, row.uid.slice(0, 10)),
      h("span", {}, row.policy === "reference" ? "reference" : `${row.stage} v${row.policy_version_first}`),
      h("span", {}, `reward ${number(row.reward, 2)}`), h("span", {}, `KL ${signed(row.kl, 3)}`), h("span", {}, `${count(row.response_len)} tokens`),
      picked ? h("small", {}, answer.leaves_at === null ? "same as the first" : `parts at token ${answer.leaves_at}`) : null,
      picked && h("span", { class: "sides" }, ["a", "b"].map((side) => h("label", {}, h("input", { type: "radio", name: `diff-${side}`, checked: picked[side] === row.uid,
        onchange: () => adjust(side === "b" ? { b: row.uid, other: "" } : { a: row.uid }) }), side.toUpperCase())))),
    answer.damage ? h("p", { class: "damage" }, answer.damage) : text(answer, teacher));
}

function sideBySide(found, titles) {
  const side = (key, own) => h("p", { class: "answer mono" }, found.parts.map(([tag, a0, a1, b0, b1]) => {
    const piece = (key === "a" ? found.a.pieces.slice(a0, a1) : found.b.pieces.slice(b0, b1)).map(shown).join("");
    if (!piece) return null;
    return tag === "equal" ? h("span", {}, piece) : h(key === "a" ? "del" : "ins", { class: own }, piece);
  }));
  return h("div", { class: "pair" }, h("div", {}, h("h3", {}, titles.a), side("a", "gone")), h("div", {}, h("h3", {}, titles.b), side("b", "new")));
}

function trend(rows) {
  if (new Set(rows.map((r) => r.version)).size < 2) return null; // one version is no curve
  const stages = [...new Set(rows.map((r) => r.stage))];
  const lines = (key) => stages.map((stage) => ({ name: stage, x: rows.filter((r) => r.stage === stage).map((r) => r.version),
    y: rows.filter((r) => r.stage === stage).map((r) => r[key]) }));
  return h("div", { class: "charts" }, chart(lines("kl"), { title: "Reverse KL of this prompt's answers", unit: "nat/token", x: "version" }),
    chart(lines("reward"), { title: "Reward", x: "version" }), chart(lines("length"), { title: "Length", unit: "tokens", x: "version" }));
}

export async function promptPage(main, { id, params }, { store, signal }) {
  const asked = { store: params.store || 0, prompt: id, group: params.group || "", stage: params.stage || "", offset: params.offset || 0 };
  const found = await once("prompt", asked, store.digest);
  // A group is named after its prompt and iteration, which several stages may share.
  const here = (group) => group.group_id === params.group && group.stage === params.stage;
  if (params.group) found.answers = found.answers.filter((a) => here(a.row));
  const teachers = [...new Set(found.answers.flatMap((a) => Object.keys(a.ratios)))];
  const teacher = teachers.includes(params.teacher) ? params.teacher : teachers[0];
  // B may be another store's answer, which can bear the same uid: its own address says so, and no radio button is set.
  const other = params.other && params.other !== (params.store || "0") ? params.other : "";
  // The first and the last that a policy wrote, where it wrote two.
  const written = found.answers.filter((a) => a.row.policy !== "reference"), pair = written.length > 1 ? written : found.answers;
  const picked = { a: params.a || pair[0]?.row.uid, b: other ? params.b : params.b || pair[pair.length - 1]?.row.uid };
  const difference = h("section", { "aria-label": "Difference" });
  const pages = Math.ceil(found.total / 64);
  put(main, h("h1", {}, params.group ? "Group " : "Prompt ", h("code", {}, params.group || id)),
    question(found.prompt),
    h("h2", {}, "Groups"),
    table([
      { title: "group", word: true, show: (g) => h("a", { href: address("prompt", id, { store: params.store, group: g.group_id, stage: g.stage }), "aria-current": here(g) ? "true" : null }, g.group_id) },
      { title: "stage", word: true, show: (g) => g.stage }, { title: "iteration", show: (g) => g.iteration }, { title: "version", show: (g) => g.version },
      { title: "answers", show: (g) => count(g.answers) }, { title: "reward", show: (g) => number(g.reward, 2) },
      { title: "spread", show: (g) => (g.answers > 1 && g.spread === 0 ? "0: teaches nothing to a group baseline" : number(g.spread, 2)) },
      { title: "KL, nat/token", show: (g) => signed(g.kl, 3) }, { title: "length, tokens", show: (g) => number(g.length, 0) },
    ], found.groups),
    params.group ? h("p", {}, h("a", { href: address("prompt", id, { store: params.store }) }, "all groups: the prompt over policy versions")) : trend(found.trend),
    h("div", { class: "row controls" }, h("h2", {}, `${count(found.total)} ${found.total === 1 ? "answer" : "answers"}`),
      teachers.length ? select("coloured by", teacher, teachers, (t) => adjust({ teacher: t })) : null,
      teachers.length ? h("div", { class: "legend" }, legend("diverging").map(([l, t]) => h("span", { style: { backgroundColor: paint("diverging", l) } }, t)), h("small", {}, "nat, teacher − sampler")) : null,
      pages > 1 ? Array.from({ length: pages }, (_, i) => h("a", { href: address("prompt", id, { ...params, offset: i * 64 || "" }) }, String(i + 1))) : null),
    difference, h("div", { class: "answers" }, found.answers.map((a) => answerCard(a, teacher, params, found.answers.length < 2 && !other ? null : other ? { a: picked.a } : picked))),
    sources("prompt", asked, found.sql, params));
  if (picked.a && picked.b && (other || picked.a !== picked.b)) {
    const titles = other ? {
      a: `A, ${store.name}`,
      b: ["B, ", h("a", { href: address("sample", picked.b, { store: other }) }, (await about(other)).name)],
    } : { a: `A, ${policyOf(found.answers, picked.a)}`, b: `B, ${policyOf(found.answers, picked.b)}` };
    ask("difference", { store: params.store || 0, other: other || params.store || 0, a: picked.a, b: picked.b }, { signal })
      .then((d) => put(difference, h("h2", {}, "A and B, token by token"), sideBySide(d, titles)), (e) => { if (e.name !== "AbortError") put(difference, h("p", { class: "empty" }, e.message)); });
  }
  const now = found.groups.findIndex(here);
  const jump = (step) => { const to = found.groups[now + step]; if (to) adjust({ group: to.group_id, stage: to.stage, a: "", b: "", other: "" }); };
  return { keys: {
    j: ["next group", () => jump(1)], k: ["previous group", () => jump(-1)], g: ["all groups", () => adjust({ group: "", stage: "", a: "", b: "", other: "" })],
    "]": ["next teacher", () => turn(1)], "[": ["previous teacher", () => turn(-1)],
  } };
  function turn(step) { if (teachers.length) adjust({ teacher: teachers[(teachers.indexOf(teacher) + step + teachers.length) % teachers.length] }); }
}
