// Samples that are being written right now, from the token log.

import { h, put } from "./dom.js";
import { count, shown } from "./format.js";
import { read } from "./state.js";

// samples: the longest; total: of all that are being written.
export function livePanel(samples, total) {
  let panel = document.getElementById("live");
  if (read().view !== "samples" || !samples.length) { if (panel) panel.remove(); return; }
  if (!panel) {
    panel = h("section", { id: "live", class: "live", "aria-label": "Being written" });
    document.getElementById("main").append(panel); // below the table, which stays where it is
  }
  put(panel, h("h2", {}, `${count(total)} ${total === 1 ? "sample" : "samples"} being written`), h("ol", {}, samples.slice(0, 6).map((s) => h("li", {},
    h("code", {}, s.uid.slice(0, 10)), h("small", {}, ` ${s.stage} · ${s.domain} · ${count(s.tokens)} ${s.tokens === 1 ? "token" : "tokens"}${s.interruptions ? ` · interrupted ${s.interruptions === 1 ? "once" : `${s.interruptions} times`}` : ""} `),
    h("span", { class: "mono" }, `…${shown(s.end)}`)))));
}
