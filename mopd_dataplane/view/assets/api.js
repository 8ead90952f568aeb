// What the page asks: of the server, or of the files of an export.

import { matches, ordered, statically } from "./files.js";

const held = new Map();

export function isStatic() {
  return Boolean(window.mopdFiles);
}

export function link(name, params = {}) {
  return `api/${name}?${new URLSearchParams(Object.entries(params).filter(([, v]) => v !== undefined && v !== null))}`;
}

export async function ask(name, params = {}, { signal } = {}) {
  if (isStatic()) return statically(name, params);
  const answer = await fetch(link(name, params), { signal, headers: { accept: "application/json" } });
  if (answer.ok) return answer.json();
  const refused = await answer.json().catch(() => ({}));
  throw new Error(refused.error || `the server answered ${answer.status}`);
}

// An answer that does not change while the snapshot does not: kept, so that "back" is at once.
export async function once(name, params, digest) {
  const key = `${name} ${digest} ${JSON.stringify(params)}`;
  if (!held.has(key)) {
    if (held.size > 40) held.delete(held.keys().next().value);
    held.set(key, ask(name, params).catch((error) => { held.delete(key); throw error; }));
  }
  return held.get(key);
}

export function forget() {
  held.clear();
}

export async function send(name, params, body) {
  const answer = await fetch(link(name, params), { method: "POST", headers: { "content-type": "application/json" },
    body: JSON.stringify(body) });
  const found = await answer.json();
  if (!answer.ok) throw new Error(found.error);
  return found;
}

// One JSON document a line, as they come.
export async function stream(name, params, each, signal) {
  const answer = await fetch(link(name, params), { signal });
  if (!answer.ok) throw new Error((await answer.json()).error);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line) each(JSON.parse(line));
  }
}

const KINDS = { "<f4": Float32Array, "<i4": Int32Array, "<u1": Uint8Array };

// Numbers of an array that travelled as base64.
export function numbers(packed) {
  if (!packed) return null;
  const bytes = Uint8Array.from(atob(packed.data), (c) => c.charCodeAt(0));
  return new KINDS[packed.kind](bytes.buffer);
}

export { matches, ordered };
