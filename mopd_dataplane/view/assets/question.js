// A prompt, as the pages of a sample and of a prompt show it: open unless it is long.

import { h } from "./dom.js";
import { count } from "./format.js";

const LONG = 2000; // characters from which on it is closed

// prompt: text, answer, teacher_context, cut; text: what the student read where that is known.
export function question(prompt, text = prompt.text) {
  const left = text === prompt.text ? prompt.cut : 0;
  const cut = left ? h("p", {}, h("small", {}, `${count(left)} more characters are not shown`)) : null;
  return h("details", { open: text.length < LONG }, h("summary", {}, text.length < LONG ? "prompt" : `prompt of ${count(text.length + left)} characters`),
    h("pre", { class: "prompt", dir: "auto" }, text), cut,
    prompt.answer ? h("p", {}, h("small", {}, "reference answer "), h("span", { class: "mono" }, prompt.answer)) : null,
    prompt.teacher_context ? [h("small", {}, "what only the teacher read"), h("pre", { class: "prompt", dir: "auto" }, prompt.teacher_context)] : null);
}
