// A sample to read: its turns by role, in whole words and as Markdown.

import { h } from "./dom.js";
import { markdown } from "./markdown.js";

// Stretches of the answer by who wrote them: the policy, or a tool or its environment.
function stretches(data) {
  const turns = [];
  for (let i = 0; i < data.length; i += 1) {
    const role = data.mask[i] ? "assistant" : "not written by the policy";
    if (!turns.length || turns.at(-1).role !== role) turns.push({ role, text: "" });
    turns.at(-1).text += data.pieces[i];
  }
  return turns;
}

export function readingView(data) {
  const asked = data.prompt.messages.length ? data.prompt.messages : [{ role: "prompt", text: data.prompt_pieces || data.prompt.text }];
  const turn = ({ role, text }) => h("section", { class: "turn", "data-role": role }, h("h2", {}, role), h("div", { class: "prose" }, markdown(text)));
  return h("div", { class: "conversation" }, asked.map(turn), stretches(data).map(turn));
}
