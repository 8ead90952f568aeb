// Two iterations, stages or stores side by side, paired over the prompts that both answered.

import { ask } from "./api.js";
import { h, put, select, table } from "./dom.js";
import { count, number, signed } from "./format.js";
import { parts } from "./stores.js";
import { sources } from "./sources.js";
import { adjust, address } from "./state.js";

const MOST_TRIES = 40; // iterations that are tried for one that shares prompts

async function choices(places, signal) {
  const stages = await Promise.all(places.map(([key]) => ask("stages", { store: key }, { signal })));
  return places.flatMap(([place, store], n) => stages[n].flatMap((s) => Array.from({ length: s.last + 1 }, (_, i) => {
    const where = `stage = '${s.stage.replace(/'/g, "''")}' and iteration = ${i}`;
    return { key: `${place}|${where}`, store: place, stage: s.stage, where, title: `${places.length > 1 ? `${store.name} · ` : ""}${s.stage} · iteration ${i}` };
  })));
}

function pair(key, digits) {
  return (row) => {
    const v = row[key];
    if (!v) return "–";
    const sure = v.ci !== null && Math.abs(v.difference) > v.ci;
    return h("span", { class: sure ? "sure" : "" }, `${number(v.a, digits)} → ${number(v.b, digits)} `, h("small", {}, `${signed(v.difference, digits)}${v.ci === null ? "" : ` ± ${number(v.ci, digits)}`}`));
  };
}

// What one compares with where nothing was chosen: the same stage from its first iteration on, of the first store or of
// the snapshot that the page shows.
function pairs(known, b, home) {
  const own = known.filter((c) => c !== b && c.stage === b.stage && c.store === home);
  return own.length ? own : [known[0]];
}

// The first of these that answered prompts which b answered too.
async function compared(candidates, b, signal) {
  let last = null;
  for (const a of candidates.slice(0, MOST_TRIES)) {
    const asked = { store: a.store, other: b.store, a: a.where, b: b.where };
    last = { a, asked, found: await ask("compare", asked, { signal }) };
    if (last.found.shared) break;
  }
  return last;
}

export async function comparePage(main, { params }, { store, stores, signal }) {
  const held = parts(params.store).snapshot, places = stores.map((s, n) => [String(n), s]);
  const known = await choices(held ? [...places, [params.store, store]] : places, signal);
  if (known.length < 2) { put(main, h("h1", {}, "Compare"), h("p", { class: "empty" }, "There is only one iteration of one stage to look at.")); return { keys: {} }; }
  const b = known.find((c) => c.key === params.b) || known[known.length - 1];
  const chosen = known.find((c) => c.key === params.a);
  const { a, asked, found } = await compared(chosen ? [chosen] : pairs(known, b, held ? params.store : "0"), b, signal);
  const options = known.map((c) => [c.key, c.title]);
  put(main, h("h1", {}, "Compare"), h("div", { class: "row controls" }, select("A", a.key, options, (k) => adjust({ a: k })), select("B", b.key, options, (k) => adjust({ b: k }))),
    h("p", { class: "lead" }, `${count(found.shared)} prompts answered by both, ${count(found.only_a)} by A only, ${count(found.only_b)} by B only. Differences are paired by prompt, ± 95 %; bold: beyond it.`),
    found.domains.length ? table([
      { title: "domain", word: true, show: (r) => r.domain }, { title: "prompts", show: (r) => count(r.prompts) }, { title: "reward", show: pair("reward", 3) },
      { title: "reverse KL, nat/token", show: pair("kl", 3) }, { title: "length, tokens", show: pair("response_len", 1) }, { title: "mean log p, nat/token", show: pair("mean_logprob", 3) },
    ], found.domains) : h("p", { class: "empty" }, "No prompt was answered by both: choose iterations that share prompts. Held-out answers of two policies: mopd compare A B."),
    found.prompts.length ? [h("h2", {}, found.prompts[0].a.reward === null || found.prompts[0].b.reward === null ? "Prompts that both answered" : "Prompts whose reward changed most"), table([
      { title: "prompt", word: true, show: (p) => h("a", { href: address("prompt", p.prompt_id, { store: a.store === "0" ? "" : a.store, a: p.a.uid, b: p.b.uid, other: a.store === b.store ? "" : b.store }) }, p.prompt_id) },
      { title: "reward", show: (p) => `${number(p.a.reward, 2)} → ${number(p.b.reward, 2)}` }, { title: "reverse KL, nat/token", show: (p) => `${signed(p.a.kl, 3)} → ${signed(p.b.kl, 3)}` },
      { title: "length, tokens", show: (p) => `${number(p.a.response_len, 0)} → ${number(p.b.response_len, 0)}` },
    ], found.prompts.slice(0, 40))] : null,
    sources("compare", asked, found.sql, { store: a.store }));
  return { keys: {} };
}
