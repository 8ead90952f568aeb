// A training step as it lay in memory: packs as bars of samples, coloured by domain, teacher or sample; what each rank got.

import { once } from "./api.js";
import { h, put, select } from "./dom.js";
import { count, number, percent, seconds } from "./format.js";
import { sources } from "./sources.js";
import { adjust, address, whole } from "./state.js";

const RANKS = [1, 2, 4, 8, 16, 32, 64];
const COLOURS = [["domain", "domain"], ["teacher", "teacher of the pack"], ["trained", "share of trained tokens"]];

function hue(found, by) {
  const names = [...new Set(found.packs.flatMap((p) => (by === "teacher" ? [p.teacher || "no teacher"] : p.members.map((m) => m.domain))))].sort();
  if (by === "trained") {
    return { key: [0, 1, 2, 3, 4].map((n) => [`var(--r${n + 1})`, `${20 * n} to ${20 * n + 20} %`]),
      of: (pack, member) => `var(--r${1 + Math.min(4, Math.floor((5 * member.loss_tokens) / Math.max(1, member.total_len)))})` };
  }
  return { key: names.map((name, i) => [`var(--series-${i % 8})`, name]),
    of: (pack, member) => `var(--series-${names.indexOf(by === "teacher" ? pack.teacher || "no teacher" : member.domain) % 8})` };
}

function packRow(pack, params, budget, colours) {
  const bar = h("div", { class: "pack", role: "img", "aria-label": `pack ${pack.pack}, ${pack.members.length} samples, ${pack.tokens} of ${budget} tokens` },
    pack.members.map((m) => h("a", { href: address("sample", m.uid, { store: params.store }), "aria-label": `sample ${m.uid.slice(0, 10)}`,
      title: `${m.uid.slice(0, 10)} · ${m.domain} · ${m.total_len} tokens, ${m.loss_tokens} trained`,
      style: { width: `${(100 * m.total_len) / budget}%`, backgroundColor: colours.of(pack, m) } })));
  return h("div", { class: "pack-row" }, h("span", {}, `${pack.pack}`), h("small", {}, pack.teacher || "no teacher"), bar, h("small", {}, percent(pack.tokens / budget, 0)));
}

function rankRow(rank, i, heaviest) {
  return h("div", { class: "pack-row" }, h("span", {}, `${i}`), h("small", {}, `${count(rank.packs.length)} ${rank.packs.length === 1 ? "pack" : "packs"}`),
    h("div", { class: "pack", role: "img", "aria-label": `rank ${i}: ${percent(rank.work, 0)} of the mean work` },
      h("i", { style: { width: `${(100 * rank.work) / heaviest}%`, backgroundColor: "var(--series-0)" } })), h("small", {}, percent(rank.work, 0)));
}

export async function stepPage(main, { id, params }, { store }) {
  const n = whole(params.n), asked = { store: params.store || 0, stage: id, step: n, ranks: params.ranks || 0 };
  const found = await once("step", asked, store.digest);
  const by = COLOURS.some(([key]) => key === params.by) ? params.by : "domain";
  const colours = hue(found, by);
  const budget = found.budget || Math.max(...found.packs.map((p) => p.tokens));
  const used = found.packs.reduce((sum, p) => sum + p.tokens, 0), heaviest = Math.max(...found.ranks.map((r) => r.work));
  const s = found.step;
  const go = (to) => adjust({ n: Math.min(found.steps.last, Math.max(found.steps.first, to)) });
  const dealt = found.ranks.length;
  put(main, h("h1", {}, `Step ${n} of ${id}`),
    h("div", { class: "row controls" }, h("button", { disabled: n <= found.steps.first, onclick: () => go(n - 1) }, "← step"), h("button", { disabled: n >= found.steps.last, onclick: () => go(n + 1) }, "step →"),
      h("label", { class: "field" }, h("span", {}, "step"), h("input", { type: "number", min: found.steps.first, max: found.steps.last, value: n, onchange: (e) => go(Number(e.target.value)) })),
      select("coloured by", by, COLOURS, (key) => adjust({ by: key })),
      h("span", {}, `${count(found.packs.length)} ${found.packs.length === 1 ? "pack" : "packs"} of ${count(budget)} tokens, ${percent(used / (budget * found.packs.length))} full · loss ${number(s.loss, 4)} · reverse KL ${number(s.reverse_kl, 4)} · ${seconds(s.step_time_s)}`)),
    h("ul", { class: "keyed" }, colours.key.map(([ink, title]) => h("li", {}, h("i", { style: { backgroundColor: ink } }), title))),
    h("div", { class: "packs" }, found.packs.map((pack) => packRow(pack, params, budget, colours))),
    h("div", { class: "row controls" }, h("h2", {}, "Work of each rank"),
      select("dealt to", dealt, [...new Set([...RANKS, dealt])].sort((a, b) => a - b).map((r) => [r, `${r} ${r > 1 ? "ranks" : "rank"}`]), (r) => adjust({ ranks: r }))),
    h("p", { class: "lead" }, "As the loader deals these packs: the same number to every rank, the heaviest first to the rank with the least work; attention's square counted. 100 % is the mean; the slowest rank sets the step's time."),
    h("div", { class: "packs ranks" }, found.ranks.map((rank, i) => rankRow(rank, i, heaviest))),
    sources("step", asked, `select * from steps where stage = '${id.replace(/'/g, "''")}' and step = ${n}`, params));
  return { keys: { "]": ["next step", () => go(n + 1)], "[": ["previous step", () => go(n - 1)] } };
}
