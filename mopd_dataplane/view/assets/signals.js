// What can be shown of each token, computed from what the store has: name, unit, scale, and a value per token.

import { diverging, rising } from "./colours.js";
import { numbers } from "./api.js";

const RANKS = [2, 4, 11, 51];
const MASS = [0.01, 0.05, 0.1, 0.3, 0.5];

// Arrays of a sample as the server sent it, decoded once.
export function unpack(sample) {
  const mask = numbers(sample.mask);
  return {
    ...sample, mask, ids: numbers(sample.ids), sampler: numbers(sample.sampler), kept: numbers(sample.kept),
    length: mask.length,
    stats: Object.fromEntries(Object.entries(sample.stats || {}).map(([k, v]) => [k, { ...v, values: numbers(v.values) }])),
    teachers: sample.teachers.map((t) => ({ ...t, logprob: numbers(t.logprob),
      alignment: t.alignment ? { ids: numbers(t.alignment.ids), pieces: t.alignment.pieces, ends: numbers(t.alignment.ends), teacherEnds: numbers(t.alignment.teacher_ends) } : null,
      topk: t.topk ? { k: t.topk.k, rank: numbers(t.topk.rank), tail: numbers(t.topk.tail) } : null })),
  };
}

function each(data, of) {
  const out = new Float32Array(data.length);
  for (let i = 0; i < data.length; i += 1) out[i] = data.mask[i] ? of(i) : NaN;
  return out;
}

const diverge = { scale: "diverging", level: diverging, unit: "nat" };
const rise = { scale: "rising", level: (v) => rising(v), unit: "nat" };

// Log-prob of a teacher minus that of the student, of each trained token.
export function ratio(data, teacher) {
  return data.sampler && teacher.logprob ? each(data, (i) => teacher.logprob[i] - data.sampler[i]) : null;
}

function spread(data, best) {
  const scored = data.teachers.filter((t) => t.logprob);
  if (scored.length < 2) return null;
  return each(data, (i) => {
    const said = scored.map((t) => t.logprob[i]);
    return Math.max(...said) - Math.min(...said);
  });
}

const OF_TEACHER = [
  { key: "ratio", title: "log-ratio: teacher − sampler", ...diverge, values: ratio },
  { key: "k3", title: "reverse KL, k3 estimate", ...rise, values: (data, t) => {
    const r = ratio(data, t);
    return r && r.map((v) => Math.exp(v) - 1 - v);
  } },
  { key: "teacher", title: "teacher surprise, −log p", ...rise, values: (data, t) => t.logprob && each(data, (i) => -t.logprob[i]) },
  { key: "rank", title: "rank among the teacher's top-k", scale: "rising", unit: "", edges: RANKS,
    level: (v) => (v === 0 ? 5 : rising(v, RANKS)), values: (data, t) => t.topk && each(data, (i) => t.topk.rank[i]) },
  { key: "tail", title: "teacher mass outside its top-k", scale: "rising", unit: "", edges: MASS,
    level: (v) => rising(v, MASS), values: (data, t) => t.topk && each(data, (i) => t.topk.tail[i]) },
];

const OF_SAMPLE = [
  { key: "spread", title: "disagreement of the teachers", ...rise, values: spread },
  { key: "sampler", title: "sampler surprise, −log p", ...rise, values: (data) => data.sampler && each(data, (i) => -data.sampler[i]) },
  { key: "kept", title: "ids that top-k and top-p kept", scale: "rising", unit: "", edges: RANKS,
    level: (v) => rising(v, RANKS), values: (data) => data.kept && each(data, (i) => data.kept[i]) },
  { key: "advantage", title: "advantage: reward − mean of the group", scale: "diverging", level: diverging, unit: "reward",
    values: (data) => (Number.isFinite(data.row.advantage) ? each(data, () => data.row.advantage) : null) },
  { key: "version", title: "policy version", scale: "kinds", unit: "", level: (v) => v,
    kinds: (data) => [...new Set(data.spans.map((span) => span.version))].map((v) => [v, `v${v}`]), values: (data) => {
    const out = new Float32Array(data.length);
    data.spans.forEach((span) => out.fill(span.version, span.start, span.end));
    return out;
  } },
  { key: "mask", title: "trained or not", scale: "kinds", unit: "", level: (v) => (v ? null : 7), kinds: () => [[null, "trained"], [7, "not trained"]],
    values: (data) => Float32Array.from(data.mask) },
];

// Signals there are for this sample and teacher, with their values.
export function signalsOf(data, teacher) {
  const made = teacher ? OF_TEACHER.map((s) => ({ ...s, teacher: teacher.name, values: s.values(data, teacher) })) : [];
  const own = OF_SAMPLE.map((s) => ({ ...s, kinds: s.kinds?.(data), values: s.values(data) }));
  const stored = Object.entries(data.stats).map(([key, s]) => ({ key: `stat/${key}`, title: s.title, unit: s.unit,
    scale: s.diverging ? "diverging" : "rising", level: s.diverging ? diverging : (v) => rising(v), values: s.values }));
  return [...made, ...own, ...stored].filter((s) => s.values);
}

// A track under the text for every teacher, and one for their disagreement.
export function tracksOf(data) {
  const tracks = data.teachers.map((t) => ({ name: t.name, scale: "diverging", level: diverging, values: ratio(data, t),
    teacher: t.name })).filter((track) => track.values);
  const apart = spread(data);
  if (apart) tracks.push({ name: "disagreement", scale: "rising", level: (v) => rising(v), values: apart });
  return tracks;
}

// The token to which a teacher gives the least against the student; the first one where that is not known.
export function mostDisliked(data, teacher) {
  const ratios = teacher && ratio(data, teacher);
  let worst = 0;
  if (ratios) ratios.forEach((v, i) => { if (v < (Number.isNaN(ratios[worst]) ? 0 : ratios[worst])) worst = i; });
  return worst;
}

// The next trained token, in a direction, at which a signal is among the strongest.
export function nextSurprise(values, from, step) {
  const sizes = Array.from(values, (v) => (Number.isNaN(v) ? -1 : Math.abs(v)));
  const sorted = sizes.filter((v) => v >= 0).sort((a, b) => b - a);
  if (!sorted.length) return null;
  const bar = Math.min(2, sorted[Math.min(sorted.length - 1, Math.floor(sorted.length / 20))]);
  for (let i = from + step; i >= 0 && i < sizes.length; i += step) if (sizes[i] >= bar && sizes[i] > 0) return i;
  return null;
}
