// The teachers: what each is, what it said of each domain, and the samples behind each number.

import { once } from "./api.js";
import { h, put, table } from "./dom.js";
import { count, number, percent, signed, size } from "./format.js";
import { address } from "./state.js";

export async function teachersPage(main, { params }, { stores }) {
  const store = stores[Number(params.store || 0)] || stores[0];
  const found = await once("teachers", { store: params.store || 0 }, store.digest);
  const f = (r) => JSON.stringify([{ c: "domain", in: [r.domain] }]);
  put(main, h("h1", {}, "Teachers"),
    table([
      { title: "teacher", word: true, show: (t) => t.name }, { title: "weights from", word: true, show: (t) => t.source },
      { title: "dtype", word: true, show: (t) => t.dtype }, { title: "rounded", word: true, show: (t) => t.quantisation },
      { title: "vocabulary", show: (t) => count(t.vocab_size) }, { title: "width", show: (t) => count(t.hidden_size) },
      { title: "digest", word: true, show: (t) => h("code", {}, String(t.weights_digest).slice(0, 12)) },
    ], found.teachers),
    h("h2", {}, "What they said"),
    h("p", { class: "lead" }, "KL: mean sampler minus teacher log-prob over loss tokens. Agrees: correlation of the teacher's liking with the verifier's reward over samples; negative means it likes wrong answers."),
    table([
      { title: "teacher", word: true, show: (r) => r.teacher }, { title: "domain", word: true, show: (r) => r.domain }, { title: "signal", word: true, show: (r) => `${r.kind} ${r.codec}` },
      { title: "samples", show: (r) => h("a", { href: address("samples", "", { store: params.store, f: f(r), order: `-kl_${r.teacher}`, w: `"kl_${r.teacher}" is not null` }) }, count(r.samples)) },
      { title: "tokens", show: (r) => count(r.tokens) }, { title: "bytes", show: (r) => size(r.bytes) }, { title: "coverage", show: (r) => percent(r.coverage) },
      { title: "KL", show: (r) => signed(r.kl, 3) }, { title: "agrees", show: (r) => signed(r.agrees) },
      { title: "differs most on", word: true, show: (r) => (found.examples[`${r.teacher}/${r.domain}`] || []).map((e) => [
        h("a", { href: address("sample", e.uid, { store: params.store, teacher: r.teacher }), title: `KL ${number(e.kl)}, reward ${number(e.reward)}` }, e.uid.slice(0, 8)), " "]) },
    ], found.judged));
  return { keys: {} };
}
