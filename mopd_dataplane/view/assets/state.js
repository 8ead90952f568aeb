// The address is the view: #/samples?store=0&… A reload, a bookmark and "back" show the same thing.

let onChange = () => {};

function decoded(text) {
  try { return decodeURIComponent(text); } catch { return text; }
}

// A whole number of the address; 0 for what is none.
export function whole(text) {
  return /^\d{1,9}$/.test(text || "") ? Number(text) : 0;
}

export function read() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const [view, ...rest] = path.split("/").map(decoded);
  return { view: view || "home", id: rest.join("/"), params: Object.fromEntries(new URLSearchParams(query || "")) };
}

export function address(view, id = "", params = {}) {
  const kept = Object.entries(params).filter(([, v]) => v !== null && v !== undefined && v !== "");
  const query = new URLSearchParams(kept).toString();
  return `#/${encodeURIComponent(view)}${id ? `/${encodeURIComponent(id)}` : ""}${query ? `?${query}` : ""}`;
}

export function go(view, id, params) {
  location.hash = address(view, id, params);
}

// Change some parameters of this view. keep: without a new entry for "back", and without drawing the page again.
export function adjust(changes, { keep = false } = {}) {
  const { view, id, params } = read();
  const next = address(view, id, { ...params, ...changes });
  if (keep) history.replaceState(null, "", next);
  else location.hash = next;
}

// Draw this view again.
export function redraw() {
  onChange({ still: true });
}

export function listen(callback) {
  onChange = callback;
  addEventListener("hashchange", () => onChange());
}

// -- filters: conditions that bars and flags make, and SQL that a person typed ------------------------------------------

// Those of the address that are conditions; one may have been cut short on its way.
export function conditions(params) {
  let found = [];
  try { found = JSON.parse(params.f || "[]"); } catch { return []; }
  return Array.isArray(found) ? found.filter((c) => typeof c?.c === "string" && (c.in === undefined || Array.isArray(c.in))) : [];
}

const name = (column) => (/^[a-z_][a-z0-9_]*$/.test(column) ? column : `"${column.replace(/"/g, '""')}"`);
const literal = (text) => `'${String(text).replace(/'/g, "''")}'`;

export function asSql(condition) {
  const column = name(condition.c);
  if (condition.flag !== undefined) return condition.flag ? column : `not ${column}`;
  if (condition.in) {
    const words = condition.in.filter((v) => v !== null).map(literal);
    const parts = [];
    if (words.length) parts.push(`${column} in (${words.join(", ")})`);
    if (condition.in.includes(null)) parts.push(`${column} is null`);
    return parts.length > 1 ? `(${parts.join(" or ")})` : parts[0];
  }
  const value = condition.time ? `epoch(${column})` : column;
  if (condition.known) return `${column} is not null`;
  const parts = [];
  if (condition.ge !== undefined) parts.push(`${value} >= ${condition.ge}`);
  if (condition.lt !== undefined) parts.push(`${value} < ${condition.lt}`);
  return parts.join(" and ");
}

export function whereOf(params) {
  const parts = conditions(params).map(asSql);
  if (params.w) parts.push(parts.length ? `(${params.w})` : params.w);
  return parts.join(" and ");
}

export function withCondition(params, condition) {
  const others = conditions(params).filter((c) => c.c !== condition.c);
  const next = condition.clear ? others : [...others, condition];
  return { f: next.length ? JSON.stringify(next) : "", at: "", page: "" };
}
