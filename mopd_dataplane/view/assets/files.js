// An export opened from disk: scripts bring the data, and this filters and sorts the chosen samples in the page.

const waiting = new Map();

// Called by the data files of an export: mopdData("sample/3f…", {…}).
export function receive(key, value) {
  window.mopdFiles.data[key] = value;
  if (waiting.has(key)) waiting.get(key)();
}

async function data(key) {
  const files = window.mopdFiles;
  if (key in files.data) return files.data[key];
  if (!(key in files.keys)) throw new Error("this is not part of the export; open the store with `mopd view`");
  await new Promise((resolve, reject) => {
    waiting.set(key, resolve);
    const script = document.createElement("script");
    script.src = files.keys[key];
    script.onerror = () => reject(new Error(`${script.src} is missing from the export`));
    document.head.append(script);
  });
  return files.data[key];
}

export function matches(row, condition) {
  const value = row[condition.c];
  if (condition.flag !== undefined) return Boolean(value) === condition.flag;
  if (condition.in) return condition.in.includes(value === null || value === undefined ? null : String(value));
  if (value === null || value === undefined) return false;
  const measured = condition.time ? Date.parse(value) / 1000 : value;
  return (condition.ge === undefined || measured >= condition.ge) && (condition.lt === undefined || measured < condition.lt);
}

export function ordered(rows, order) {
  if (!order) return rows;
  const down = order.startsWith("-"), key = order.replace(/^-/, "");
  const sign = down ? -1 : 1;
  return [...rows].sort((x, y) => {
    const a = x[key], b = y[key];
    if (a === null || a === undefined) return b === null || b === undefined ? 0 : 1;
    if (b === null || b === undefined) return -1;
    return a < b ? -sign : a > b ? sign : 0;
  });
}

function histogram(rows, here, column) {
  const kind = column.kind, get = (r) => (kind === "time" ? Date.parse(r[column.name]) / 1000 : r[column.name]);
  if (kind === "number" || kind === "time") {
    const values = rows.map(get).filter((v) => v !== null && Number.isFinite(v));
    if (!values.length) return { kind, bins: [] };
    const low = Math.min(...values), high = Math.max(...values);
    const whole = kind === "number" && values.every(Number.isInteger);
    const width = whole ? Math.max(1, Math.ceil((high - low + 1) / 32)) : (high - low) / 32 || 1;
    const bins = Array.from({ length: Math.max(1, Math.min(32, Math.floor((high - low) / width) + 1)) }, () => ({ all: 0, here: 0 }));
    const place = (v) => Math.min(bins.length - 1, Math.floor((v - low) / width));
    for (const v of values) bins[place(v)].all += 1;
    for (const v of here.map(get)) if (v !== null && Number.isFinite(v)) bins[place(v)].here += 1;
    return { kind, low, width, whole, bins };
  }
  const counts = new Map();
  const word = (v) => (v === null || v === undefined ? null : String(v));
  for (const r of rows) counts.set(word(get(r)), (counts.get(word(get(r))) || 0) + 1);
  const match = new Map();
  for (const r of here) match.set(word(get(r)), (match.get(word(get(r))) || 0) + 1);
  const bins = [...counts].sort((a, b) => b[1] - a[1]).slice(0, 24);
  return { kind, bins: bins.map(([value, all]) => ({ value, all, here: match.get(value) || 0 })) };
}

async function chosen(params) {
  const { columns, rows } = await data("samples");
  const all = rows.map((row) => Object.fromEntries(columns.map((c, i) => [c, row[i]])));
  const wanted = JSON.parse(params.f || "[]");
  return { columns, all, here: all.filter((row) => wanted.every((c) => matches(row, c))) };
}

const ANSWERS = {
  stores: () => data("stores"),
  home: () => data("home"),
  corrections: (p) => data(`corrections/${p.iteration}`),
  corrected: (p) => data(`corrected/${p.iteration}`),
  run: () => data("run"),
  teachers: () => data("teachers"),
  sample: (p) => data(`sample/${p.uid}`),
  life: (p) => data(`life/${p.uid}`),
  candidates: async (p) => (await data(`candidates/${p.uid}`))[p.position]
    || { teachers: [], note: "the export holds candidates of the most surprising tokens only" },
  prompt: (p) => data(`prompt/${p.prompt}`),
  samples: async (p) => {
    const { columns, here } = await chosen(p);
    const page = ordered(here, p.order).slice(Number(p.offset || 0), Number(p.offset || 0) + Number(p.limit));
    return { total: here.length, columns, rows: page.map((row) => columns.map((c) => row[c])), sql: "" };
  },
  histograms: async (p) => {
    const { all, here } = await chosen(p), [store] = await data("stores");
    const known = store.columns.filter((c) => p.columns.split(",").includes(c.name));
    return Object.fromEntries(known.map((c) => [c.name, histogram(all, here, c)]));
  },
  excerpts: () => data("excerpts"),
};

export async function statically(name, params) {
  if (!(name in ANSWERS)) throw new Error("an export cannot answer this; open the store with `mopd view`");
  return ANSWERS[name](params);
}
