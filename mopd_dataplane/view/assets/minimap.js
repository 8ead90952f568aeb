// The whole answer as one line: where the tokens are that a teacher disliked most.

import { h } from "./dom.js";
import { number, shown } from "./format.js";

const MOST = 10;

// Positions of the tokens with the smallest values, the smallest first; only those below 0.
export function mostNegative(values, most = MOST) {
  return Array.from(values, (value, i) => [value, i]).filter(([value]) => value < 0).sort((a, b) => a[0] - b[0]).slice(0, most).map(([, i]) => i);
}

// values: teacher minus student, in nats. onpick(position)
export function minimap(data, teacher, values, onpick) {
  const worst = mostNegative(values);
  if (!worst.length) return null;
  const here = h("i", { class: "here" });
  const share = (i) => `${(100 * (i + 0.5)) / data.length}%`;
  const ticks = worst.map((i, n) => h("button", { type: "button", class: "tick", style: { left: share(i) }, onclick: () => onpick(i),
    title: `${n + 1}. position ${i}: ${shown(data.pieces[i])}, ${number(values[i], 1)} nat`, "aria-label": `disliked token ${n + 1} of ${worst.length}: position ${i}, ${number(values[i], 1)} nat` }));
  const root = h("div", { class: "minimap", role: "group", "aria-label": `Where ${teacher} dislikes most` }, here, ticks);
  root.moveTo = (i) => { here.style.left = share(i); };
  return root;
}
