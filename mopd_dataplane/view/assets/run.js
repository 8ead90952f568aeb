// The run: curves with intervals, steps, where the time went, and what it was made with.

import { isStatic, link, once } from "./api.js";
import { chart } from "./chart.js";
import { h, put, select, table } from "./dom.js";
import { count, percent, seconds } from "./format.js";
import { runState } from "./run_state.js";
import { sources } from "./sources.js";
import { adjust, address, go, whole } from "./state.js";

function group(rows, key) {
  const out = new Map();
  for (const row of rows) {
    if (!out.has(key(row))) out.set(key(row), []);
    out.get(key(row)).push(row);
  }
  return out;
}

// least: what the lower end of an interval cannot fall below.
function byDomain(rows, y, ci, least = -Infinity) {
  return [...group(rows, (r) => r.domain)].map(([name, own]) => ({
    name, x: own.map((r) => r.iteration), y: own.map((r) => r[y]),
    ...(ci ? { low: own.map((r) => (r[ci] === null ? null : Math.max(least, r[y] - r[ci]))), high: own.map((r) => (r[ci] === null ? null : r[y] + r[ci])) } : {}),
  }));
}

function stepLines(rows, key) {
  return [{ name: key, x: rows.map((r) => r.step), y: rows.map((r) => r[key]) }];
}

// Title and unit of what objectives measure; another package's terms go by their own names.
const MEASURES = { forward_kl: ["Forward KL", "nat/token"], entropy: ["Entropy", "nat/token"], student_entropy: ["Student entropy", "nat/token"],
  teacher_entropy: ["Teacher entropy", "nat/token"], top1_agreement: ["Same likeliest token", "share"], reward: ["Reward of what was trained", "mean"] };

// Whether the curves by teacher differ from those by domain: not where each domain has a teacher of its own.
function severalTeachers(scored, rollouts, stage) {
  const teachers = new Set(scored.filter((r) => r.stage === stage).map((r) => r.teacher));
  return teachers.size !== new Set(rollouts.map((r) => r.domain)).size;
}

const SMOOTHING = [["", "no"], ["3", "3 values"], ["9", "9 values"], ["31", "31 values"]];

function extras(rows, options) {
  const keys = [...new Set(rows.flatMap((r) => Object.keys(r.extra || {})))].filter((k) => !k.startsWith("sampler_gap_") && rows.some((r) => Number.isFinite(r.extra[k])));
  const line = (key, name) => ({ name, x: rows.map((r) => r.step), y: rows.map((r) => r.extra[key] ?? null) });
  const ofTeachers = (what, title, unit) => {
    const own = keys.filter((k) => k.startsWith("teacher/") && k.endsWith(`/${what}`));
    return own.length ? chart(own.map((k) => line(k, k.slice("teacher/".length, -what.length - 1))), { title, unit, ...options }) : null;
  };
  return [
    ofTeachers("reverse_kl", "Reverse KL by teacher, while training", "nat/token"), ofTeachers("weight", "Weight of each teacher"),
    ...keys.filter((k) => !k.startsWith("teacher/")).map((k) => {
      const [title, unit] = MEASURES[k] || [k.replace(/_/g, " "), ""];
      return chart([line(k, k)], { title, unit, ...options });
    }),
  ];
}

// From the statistics that training kept of some samples.
function kept(rows, options) {
  const line = (key, name) => ({ name, x: rows.map((r) => r.step), y: rows.map((r) => r[key]) });
  return [
    chart([line("gap", "mean")], { title: "Trainer against sampler, |log-prob gap|", unit: "nat/token", ...options }),
    chart([line("student_entropy", "student"), line("teacher_entropy", "teacher")], { title: "Entropy on trained tokens", unit: "nat", ...options }),
  ];
}

// Sampler, teachers and trainer beside the plain pass of their models, then the trainer beside the sampler, also along
// the answers.
function exactness(checks, gaps, positions) {
  const nat = (value) => (value === null ? "–" : Number(value.toPrecision(2)).toString());
  const stage = { title: "stage", word: true, show: (r) => r.stage }, allowed = { title: "allowed", show: (r) => String(r.band) };
  return [
    checks.length ? table([stage, { title: "part", word: true, show: (r) => `${r.part} ${r.teacher}`.trim() }, { title: "model", word: true, show: (r) => r.model },
      { title: "dtype", word: true, show: (r) => r.dtype }, { title: "tokens", show: (r) => (r.tokens ? count(r.tokens) : "–"), tip: "Length of the longest text that was read" }, { title: "from the plain pass, nat", show: (r) => nat(r.gap), tip: "Mean difference of log-probs from the model's own plain pass of the same texts" }, allowed], checks)
      : h("p", { class: "empty" }, "No self-check is recorded."),
    gaps.length ? table([stage, { title: "window", show: (r) => count(r.window) }, { title: "sampler", word: true, show: (r) => `${r.engine}, ${r.sampler_dtype}` }, { title: "trainer", word: true, show: (r) => r.dtype },
      { title: "mean, nat", show: (r) => nat(r.mean), tip: "Trainer against sampler on the policy's own samples before it is trained on them" }, { title: "99th percentile", show: (r) => nat(r.p99) },
      { title: "outside", show: (r) => percent(r.outside) }, allowed], gaps) : null,
    gaps.filter((r) => r.warning).map((r) => h("p", { class: "lead" }, r.warning)),
    positions.length ? table([stage, { title: "window", show: (r) => count(r.window) }, { title: "trained tokens", word: true, show: (r) => `${r.start}–${r.last}`, tip: "Positions in the answer, of samples whose statistics were kept" },
      { title: "count", show: (r) => count(r.tokens) }, { title: "mean, nat", show: (r) => nat(r.mean) }, { title: "99th percentile", show: (r) => nat(r.p99) }], positions) : null,
  ];
}

function timeline(times, steps) {
  const own = times.filter((t) => t.end > t.start);
  if (!own.length) return h("p", { class: "empty" }, "No stage times were recorded.");
  const from = Math.min(...own.map((t) => t.start)), to = Math.max(...own.map((t) => t.end));
  const share = (t) => `${(100 * (t - from)) / (to - from)}%`;
  const hues = new Map();
  return h("div", { class: "timeline", role: "img", "aria-label": `Stages over ${seconds(to - from)}` },
    [...group(own, (t) => t.stage)].map(([stage, spans]) => h("div", { class: "track" }, h("span", { class: "track-name" }, stage),
      h("div", { class: "track-bar" }, spans.map((t) => {
        if (!hues.has(t.track)) hues.set(t.track, hues.size % 8);
        const bar = h("i", { title: `${stage} · ${t.track}${t.iteration >= 0 ? ` ${t.iteration}` : ""} · ${seconds(t.end - t.start)}` });
        Object.assign(bar.style, { left: share(t.start), width: `max(2px, ${(100 * (t.end - t.start)) / (to - from)}%)`, backgroundColor: `var(--series-${hues.get(t.track)})` });
        return bar;
      })))),
    h("p", { class: "keyed" }, [...hues].map(([track, hue]) => h("span", {}, Object.assign(h("i", {}), {}), track)).map((node, i) => {
      node.firstChild.style.backgroundColor = `var(--series-${[...hues.values()][i]})`;
      return node;
    })));
}

// open: how many levels are open.
function settings(value, open = 0) {
  if (value === null || typeof value !== "object") return h("code", {}, JSON.stringify(value));
  const entries = Object.entries(value);
  if (!entries.length) return h("code", {}, Array.isArray(value) ? "[]" : "{}");
  return h("ul", { class: "tree" }, entries.map(([key, v]) => h("li", {}, v !== null && typeof v === "object" && Object.keys(v).length
    ? h("details", { open: open > 0 }, h("summary", {}, key), settings(v, open - 1)) : [h("span", {}, `${key} = `), settings(v)])));
}

// Held-out answers of a policy with several versions: the share that is entirely right, where that is known, and the mean reward.
function heldOut(evals, changes, shared) {
  const policies = [...group(evals, (r) => r.policy)].filter(([, rows]) => new Set(rows.map((r) => r.policy_version)).size > 1);
  const lines = (rows, value, low, high) => [...group(rows.filter((r) => r[value] !== null), (r) => r.domain)].map(([name, own]) => ({
    name, x: own.map((r) => r.policy_version), y: own.map((r) => r[value]), low: own.map((r) => r[low]), high: own.map((r) => r[high]) }));
  return policies.flatMap(([policy, rows]) => [
    rows.some((r) => r.accuracy !== null) ? chart(lines(rows, "accuracy", "accuracy_low", "accuracy_high"),
      { title: `Held-out accuracy of ${policy}`, unit: "share entirely right, 95 % intervals", x: "version", shared, marks: marksOf(changes, policy, "iteration", 0.5) }) : null,
    chart(lines(rows, "reward", "low", "high"), { title: `Held-out mean reward of ${policy}`, unit: "95 % intervals", x: "version", shared, marks: marksOf(changes, policy, "iteration", 0.5) })]);
}

// Vertical lines where a stage goes by other values of what is computed: before the first iteration or step with them.
function marksOf(changes, stage, axis, offset) {
  const at = new Map();
  for (const change of changes) {
    if (change.stage !== stage || change.change_class === "free" || change[axis] === null) continue;
    at.set(change[axis] + offset, [...(at.get(change[axis] + offset) || []), change.text]);
  }
  return [...at].map(([x, texts]) => ({ x, title: texts.join(" · ") }));
}

function changesTable(changes) {
  if (!changes.length) return h("p", { class: "empty" }, "The job is the one that the run began with.");
  return table([{ title: "stage", word: true, show: (c) => c.stage }, { title: "from iteration", show: (c) => count(c.iteration) }, { title: "change", word: true, show: (c) => c.text },
    { title: "class", word: true, show: (c) => c.change_class }, { title: "when", word: true, show: (c) => c.created_at }, { title: "command", word: true, show: (c) => c.command }], changes);
}

// The run that this one was forked from, and the forks that lie beside it. What a rewind left is grey.
function forksTree(forks) {
  return [h("h2", {}, "Forks"), h("ul", { class: "tree" }, forks.map((f) => {
    const item = h("li", { class: f.is_left ? "left" : "" }, f.is_this ? h("strong", {}, f.folder) : f.folder, f.text ? ` ${f.text}` : "");
    item.style.marginLeft = `${1.5 * f.depth}em`;
    return item;
  }))];
}

export async function runPage(main, { params }, { store }) {
  const query = { store: params.store || 0 };
  const [run, state] = await Promise.all([once("run", query, store.digest), isStatic() ? null : once("state", query, store.digest)]);
  const stages = [...new Set([...run.rollouts.map((r) => r.stage), ...run.steps.map((s) => s.stage)])];
  const last = run.rollouts.length ? run.rollouts[run.rollouts.length - 1].stage : stages[stages.length - 1];
  const stage = stages.includes(params.stage) ? params.stage : last;
  const rollouts = run.rollouts.filter((r) => r.stage === stage), steps = run.steps.filter((s) => s.stage === stage);
  const iterations = rollouts.length ? Math.max(...rollouts.map((r) => r.iteration)) + 1 : 1, each = steps.length ? (Math.max(...steps.map((s) => s.step)) + 1) / iterations : 1;
  const asIteration = { to: (x) => x, from: (x) => x }, asStep = { to: (x) => (x + 0.5) / each - 0.5, from: (x) => (x + 0.5) * each - 0.5 };
  const smooth = whole(params.smooth);
  const ofSteps = { smooth, shared: asStep, marks: marksOf(run.changes, stage, "step", -0.5) };
  const first = { x: "iteration", smooth, shared: asIteration, marks: marksOf(run.changes, stage, "iteration", -0.5), onpick: (x) => go("samples", "", {
    store: params.store, f: JSON.stringify([{ c: "stage", in: [stage] }, { c: "iteration", ge: x, lt: x + 1 }]), order: "-kl" }) };
  const waits = steps.map((s) => (s.step_time_s ? s.data_wait_s / s.step_time_s : null));
  put(main, state ? runState(state, store, params) : null, h("h1", {}, store.name), h("p", { class: "where" }, `${store.uri} · snapshot ${store.digest} · ${count(store.samples)} samples`),
    h("div", { class: "row controls" }, stages.length ? select("stage", stage, stages, (s) => adjust({ stage: s })) : null,
      select("smooth", params.smooth || "", SMOOTHING, (n) => adjust({ smooth: n })),
      steps.length ? h("a", { href: address("step", stage, { store: params.store, n: steps[0].step }) }, "packs of a step") : null,
      isStatic() ? null : h("a", { href: link("trace", { store: params.store || 0 }), download: "trace.json" }, "Chrome trace (opens in Perfetto)")),
    h("h2", {}, "Rollouts"), rollouts.length ? h("p", { class: "where" }, "Click a curve for the samples of an iteration; the cursor moves over all curves.") : h("p", { class: "empty" }, "This stage has no samples yet."),
    h("div", { class: "charts" },
      chart(byDomain(rollouts, "reward", "reward_ci"), { title: "Reward", unit: "mean, 95 % interval", ...first }),
      chart(byDomain(rollouts, "kl", "kl_ci"), { title: "Reverse KL to the teachers", unit: "nat/token, 95 % interval", ...first }),
      severalTeachers(run.scored, rollouts, stage) ? chart([...group(run.scored.filter((r) => r.stage === stage), (r) => r.teacher)].map(([name, own]) => ({ name, x: own.map((r) => r.iteration), y: own.map((r) => r.kl),
        low: own.map((r) => (r.kl_ci === null ? null : r.kl - r.kl_ci)), high: own.map((r) => (r.kl_ci === null ? null : r.kl + r.kl_ci)) })),
      { title: "Reverse KL by teacher", unit: "nat/token, 95 % interval", ...first }) : null,
      chart(byDomain(rollouts, "length", "length_ci"), { title: "Response length", unit: "tokens, mean, 95 % interval", ...first }),
      chart(byDomain(rollouts, "length_p95"), { title: "Response length, 95th percentile", unit: "tokens", ...first }),
      chart(byDomain(rollouts, "truncated", "truncated_ci", 0), { title: "Truncated", unit: "share of samples, 95 % interval", ...first }),
      rollouts.some((r) => r.flat !== null) ? chart(byDomain(rollouts, "flat"), { title: "Groups without spread", unit: "share of samples whose group has one reward", ...first,
        onpick: (x) => go("samples", "", { store: params.store, f: JSON.stringify([{ c: "stage", in: [stage] }, { c: "iteration", ge: x, lt: x + 1 }]), w: "group_spread = 0" }) }) : null,
      chart(byDomain(rollouts, "surprise"), { title: "Sampler surprise", unit: "nat/token, −mean log p", ...first }),
      heldOut(run.evals, run.changes, asIteration)),
    h("h2", {}, "Training"),
    steps.length ? h("div", { class: "charts" },
      chart(stepLines(steps, "loss"), { title: "Loss", ...ofSteps }), chart(stepLines(steps, "reverse_kl"), { title: "Reverse KL", unit: "nat/token", ...ofSteps }),
      chart(stepLines(steps, "grad_norm"), { title: "Gradient norm", unit: "before clipping", ...ofSteps }), chart(stepLines(steps, "learning_rate"), { title: "Learning rate", ...ofSteps }),
      chart(stepLines(steps, "staleness_mean"), { title: "Staleness", unit: "versions, mean", ...ofSteps }), chart(stepLines(steps, "tokens_per_s"), { title: "Throughput", unit: "tokens/s", ...ofSteps }),
      chart(stepLines(steps, "step_time_s"), { title: "Time of a step", unit: "s", ...ofSteps }),
      chart([{ name: "share", x: steps.map((s) => s.step), y: waits }], { title: "Waiting for data", unit: "share of the step", ...ofSteps }), extras(steps, ofSteps), kept(run.measured.filter((r) => r.stage === stage), ofSteps))
      : h("p", { class: "empty" }, "This stage has not trained yet."),
    h("h2", {}, "Changes of the job"), changesTable(run.changes), run.forks.length ? forksTree(run.forks) : null,
    h("h2", {}, "Exactness"), exactness(run.self_checks, run.sampler_gaps, run.gaps_by_position),
    h("h2", {}, "Time"), timeline(run.times, run.steps),
    h("h2", {}, "Made with"), Object.keys(run.made_with).length ? settings(run.made_with, 4) : h("p", { class: "empty" }, "The store does not say what it was made with."),
    h("h2", {}, "Settings of the job"), Object.keys(run.job).length ? settings(run.job) : h("p", { class: "empty" }, "No job made this store."),
    sources("run", { store: params.store || 0 }, run.sql, params));
  const turn = (step) => { if (stages.length) adjust({ stage: stages[(stages.indexOf(stage) + step + stages.length) % stages.length] }); };
  return { keys: { "]": ["next stage", () => turn(1)], "[": ["previous stage", () => turn(-1)] } };
}
