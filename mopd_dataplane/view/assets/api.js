// What the page asks: of the server, or of the files of an export.

import { matches, ordered, statically } from "./files.js";

const held = new Map();

export function isStatic() {
  return Boolean(window.mopdFiles);
}

export function link(name, params = {}) {
  return `api/${name}?${new URLSearchParams(Object.entries(params).filter(([, v]) => v !== undefined && v !== null))}`;
}

let onGone = () => {};

// callback: is called when the server does not answer.
export function whenGone(callback) {
  onGone = callback;
}

async function reach(address, options) {
  try { return await fetch(address, options); } catch (error) {
    if (error.name === "AbortError") throw error;
    onGone();
    throw Object.assign(new Error("The server of this page does not answer."), { unreachable: true });
  }
}

export async function ask(name, params = {}, { signal } = {}) {
  if (isStatic()) return statically(name, params);
  const answer = await reach(link(name, params), { signal, headers: { accept: "application/json" } });
  if (answer.ok) return answer.json();
  throw await refusalOf(answer);
}

// An answer that says what is wrong, as an error of that `kind`.
async function refusalOf(answer) {
  const refused = await answer.json().catch(() => ({}));
  return Object.assign(new Error(refused.error || `the server answered ${answer.status}`), { kind: refused.kind });
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
  const answer = await reach(link(name, params), { method: "POST", headers: { "content-type": "application/json" },
    body: JSON.stringify(body) });
  const found = await answer.json();
  if (!answer.ok) throw new Error(found.error);
  return found;
}

// One JSON document a line, as they come.
export async function stream(name, params, each, signal) {
  const answer = await reach(link(name, params), { signal });
  if (!answer.ok) throw await refusalOf(answer);
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
