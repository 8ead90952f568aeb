// Markdown as elements: headings, lists, quotes, code, emphasis. Text stays text: no link, no image, no markup of a model.

import { h } from "./dom.js";

const MARK = /(`+)([\s\S]*?[^`])\1(?!`)|\*\*([^\s*][\s\S]*?)\*\*|\*([^\s*][^*\n]*?)\*/g;
const BLOCK = /^(#{1,6}\s|```|>|\s*([-*+]|\d{1,9}[.)])\s)/;

function inline(text) {
  const parts = [];
  let last = 0;
  for (const match of text.matchAll(MARK)) {
    parts.push(text.slice(last, match.index));
    parts.push(match[2] !== undefined ? h("code", {}, match[2]) : match[3] !== undefined ? h("strong", {}, match[3]) : h("em", {}, match[4]));
    last = match.index + match[0].length;
  }
  return [...parts, text.slice(last)];
}

const item = (line) => line.match(/^\s*(?:[-*+]|(\d{1,9})[.)])\s+(.*)$/);

export function markdown(text) {
  const lines = text.split("\n"), blocks = [];
  let at = 0;
  const take = (matches) => { // the lines from here on that match
    const from = at;
    while (at < lines.length && matches(lines[at])) at += 1;
    return lines.slice(from, at);
  };
  while (at < lines.length) {
    const line = lines[at], heading = line.match(/^(#{1,6})\s+(.*)$/);
    if (!line.trim()) at += 1;
    else if (line.startsWith("```")) {
      at += 1;
      blocks.push(h("pre", { class: "code", dir: "ltr" }, take((l) => !l.startsWith("```")).join("\n")));
      at += 1;
    } else if (heading) {
      at += 1;
      blocks.push(h("p", { class: "heading", dir: "auto" }, inline(heading[2])));
    } else if (line.startsWith(">")) blocks.push(h("blockquote", { dir: "auto" }, inline(take((l) => l.startsWith(">")).map((l) => l.replace(/^>\s?/, "")).join("\n"))));
    else if (item(line)) {
      const rows = take((l) => item(l)).map(item);
      blocks.push(h(rows[0][1] ? "ol" : "ul", rows[0][1] ? { start: rows[0][1] } : {}, rows.map((row) => h("li", { dir: "auto" }, inline(row[2])))));
    } else blocks.push(h("p", { dir: "auto" }, inline(take((l) => l.trim() && (l === line || !BLOCK.test(l))).join("\n"))));
  }
  return blocks;
}
