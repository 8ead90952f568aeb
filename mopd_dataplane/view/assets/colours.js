// One scale for all samples: nats. Blue: the teacher liked the token more than the student did; orange: less.

export const EDGES = [0.1, 0.5, 1, 2];
const STEPS = [0.1, 0.5, 1, 2, 4];

// −4 … 4
export function diverging(nats) {
  if (nats === null || nats === undefined || Number.isNaN(nats)) return null;
  let level = 0;
  while (level < EDGES.length && Math.abs(nats) >= EDGES[level]) level += 1;
  return nats < 0 ? -level : level;
}

// 0 … 5
export function rising(value, edges = STEPS) {
  if (value === null || value === undefined || Number.isNaN(value)) return null;
  let level = 0;
  while (level < edges.length && value >= edges[level]) level += 1;
  return level;
}

export function paint(scale, level) {
  if (level === null || level === undefined) return "var(--none)";
  if (scale === "diverging") return `var(--d${level < 0 ? "m" : ""}${Math.abs(level)})`;
  if (scale === "rising") return `var(--r${level})`;
  return `var(--k${level % 8})`;
}

export function legend(scale, edges = STEPS) {
  if (scale === "diverging") {
    const below = [4, 3, 2, 1].map((l) => [-l, l === 4 ? "≤ −2" : `−${EDGES[l - 1]}`]);
    return [...below, [0, "0"], ...[1, 2, 3, 4].map((l) => [l, l === 4 ? "≥ 2" : `${EDGES[l - 1]}`])];
  }
  if (scale === "rising") return [[0, "0"], ...edges.map((e, i) => [i + 1, i === edges.length - 1 ? `≥ ${e}` : `${e}`])];
  return [];
}
