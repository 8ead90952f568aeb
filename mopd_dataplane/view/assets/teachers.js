// The teachers: what each is, what it said of each domain, and the samples behind each number.

import { once } from "./api.js";
import { h, put, table } from "./dom.js";
import { count, number, percent, signed, size } from "./format.js";
import { sources } from "./sources.js";
import { address } from "./state.js";

export async function teachersPage(main, { params }, { store }) {
  const found = await once("teachers", { store: params.store || 0 }, store.digest);
  const f = (r) => JSON.stringify([{ c: "domain", in: [r.domain] }]);
  const examples = (r, kind) => ((found.examples[`${r.teacher}/${r.domain}`] || {})[kind] || []).map((e) => [
    h("a", { href: address("sample", e.uid, { store: params.store, teacher: r.teacher }), title: `KL ${number(e.kl)}, mean log p ${number(e.logprob)}, reward ${number(e.reward)}` }, e.uid.slice(0, 8)), " "]);
  put(main, h("h1", {}, "Teachers"),
    table([
      { title: "teacher", word: true, show: (t) => t.name }, { title: "weights from", word: true, show: (t) => t.source },
      { title: "dtype", word: true, show: (t) => t.dtype }, { title: "rounded", word: true, show: (t) => t.quantisation },
      { title: "vocabulary", show: (t) => count(t.vocab_size) }, { title: "width", show: (t) => count(t.hidden_size) },
      { title: "digest", word: true, show: (t) => h("code", {}, String(t.weights_digest).slice(0, 12)) },
    ], found.teachers),
    h("h2", {}, "What they said"),
    h("p", { class: "lead" }, "Means over trained tokens, in nats. KL: sampler minus teacher log-prob. Entropy and same first choice (student and teacher hold the same token likeliest): of samples whose statistics were kept. Right over wrong: the chance that the teacher gives a right answer a higher mean log-prob than a wrong one; 0.5 is a coin's. Accuracy: the teacher's own, on held-out prompts. Overlap, calibration and push need the models: ", h("code", {}, "mopd teachers"), " measures them."),
    table([
      { title: "teacher", word: true, show: (r) => r.teacher }, { title: "domain", word: true, show: (r) => r.domain }, { title: "signal", word: true, show: (r) => `${r.kind} ${r.codec}` },
      { title: "samples", show: (r) => h("a", { href: address("samples", "", { store: params.store, f: f(r), order: `-kl_${r.teacher}`, w: `"kl_${r.teacher}" is not null` }) }, count(r.samples)) },
      { title: "tokens", show: (r) => count(r.tokens) }, { title: "bytes", show: (r) => size(r.bytes) },
      { title: "accuracy", show: (r) => percent(r.accuracy) }, { title: "log p", show: (r) => number(r.logprob) }, { title: "KL", show: (r) => signed(r.kl, 3) },
      { title: "entropy", show: (r) => number(r.entropy) }, { title: "same first choice", show: (r) => percent(r.top1) }, { title: "right over wrong", show: (r) => number(r.discrimination, 2) },
      { title: "differs most on", word: true, show: (r) => examples(r, "far") }, { title: "likes, though wrong", word: true, show: (r) => examples(r, "liked") },
      { title: "dislikes, though right", word: true, show: (r) => examples(r, "disliked") },
    ], found.scored), health(found.health), sources("teachers", { store: params.store || 0 }, found.sql, params));
  return { keys: {} };
}

// What each signal is like where it was scored last, and the checks that it fails.
function health(found) {
  return [
    h("h2", {}, "Health of the signals"),
    found.rows.length ? table(found.head.map((title, i) => ({ title, word: i < 4 && i !== 1, show: (r) => r[i] })), found.rows)
      : h("p", { class: "empty" }, "No signal has been measured."),
    found.warnings.map((text) => h("p", { class: "lead" }, text)),
  ];
}
