// The stores of the page and their snapshots. The address names one by its place in the command line; what is not the
// newest has "@" and a snapshot behind it: a tag, or the digest of one that was shown.

import { ask } from "./api.js";

const held = new Map();
let stores = [];

export async function readStores() {
  stores = await ask("stores");
  return stores;
}

export function parts(key) {
  const [place, ...snapshot] = String(key || "0").split("@");
  return { place, snapshot: snapshot.join("@") };
}

export function keyOf(place, snapshot) {
  return snapshot ? `${place}@${snapshot}` : place === "0" ? "" : place;
}

// The description of what a key names.
export async function about(key) {
  const { place, snapshot } = parts(key);
  const newest = /^\d+$/.test(place) ? stores[Number(place)] : undefined;
  if (!newest) throw new Error(`There is no store ${place}: this page shows ${stores.length}, counted from 0.`);
  if (!snapshot) return newest;
  if (!held.has(key)) held.set(key, { ...await ask("store", { store: key }), name: `${newest.name} @ ${snapshot}` });
  return held.get(key);
}
