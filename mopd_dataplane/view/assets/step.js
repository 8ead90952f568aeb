// A training step as it lay in memory: packs as bars of samples, coloured by domain, grouped by teacher.

import { once } from "./api.js";
import { h, put } from "./dom.js";
import { count, number, percent, seconds } from "./format.js";
import { adjust, address } from "./state.js";

export async function stepPage(main, { id, params }, { stores }) {
  const store = stores[Number(params.store || 0)] || stores[0];
  const n = Number(params.n || 0);
  const found = await once("step", { store: params.store || 0, stage: id, step: n }, store.digest);
  const domains = [...new Set(found.packs.flatMap((p) => p.members.map((m) => m.domain)))].sort();
  const budget = found.budget || Math.max(...found.packs.map((p) => p.tokens));
  const used = found.packs.reduce((sum, p) => sum + p.tokens, 0);
  const s = found.step;
  const go = (to) => adjust({ n: Math.min(found.steps.last, Math.max(found.steps.first, to)) });
  put(main, h("h1", {}, `Step ${n} of ${id}`),
    h("div", { class: "row controls" }, h("button", { disabled: n <= found.steps.first, onclick: () => go(n - 1) }, "← step"), h("button", { disabled: n >= found.steps.last, onclick: () => go(n + 1) }, "step →"),
      h("span", {}, `${found.packs.length} packs of ${count(budget)} tokens, ${percent(used / (budget * found.packs.length))} full · loss ${number(s.loss, 4)} · reverse KL ${number(s.reverse_kl, 4)} · ${seconds(s.step_time_s)}`)),
    h("ul", { class: "keyed" }, domains.map((d, i) => { const key = h("i", {}); key.style.backgroundColor = `var(--series-${i % 8})`; return h("li", {}, key, d); })),
    h("div", { class: "packs" }, found.packs.map((pack) => {
      const bar = h("div", { class: "pack", role: "img", "aria-label": `pack ${pack.pack}, ${pack.members.length} samples, ${pack.tokens} of ${budget} tokens` },
        pack.members.map((m) => {
          const piece = h("a", { href: address("sample", m.uid, { store: params.store }), title: `${m.uid.slice(0, 10)} · ${m.domain} · ${m.total_len} tokens, ${m.loss_tokens} trained`, "aria-label": `sample ${m.uid.slice(0, 10)}` });
          Object.assign(piece.style, { width: `${(100 * m.total_len) / budget}%`, backgroundColor: `var(--series-${domains.indexOf(m.domain) % 8})` });
          return piece;
        }));
      return h("div", { class: "pack-row" }, h("span", {}, `${pack.pack}`), h("small", {}, pack.teacher || "no teacher"), bar, h("small", {}, percent(pack.tokens / budget, 0)));
    })));
  return { keys: { "]": ["next step", () => go(n + 1)], "[": ["previous step", () => go(n - 1)] } };
}
