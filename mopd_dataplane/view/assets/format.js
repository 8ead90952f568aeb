// Numbers, times, bytes and names as people read them.

const STEERING = /(?![\n\t])[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}]/gu;

export function count(value) {
  return value === null || value === undefined ? "–" : Math.round(value).toLocaleString("en-US");
}

export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value !== 0 && Math.abs(value) < 10 ** -digits) return value.toExponential(1).replaceAll("-", "−");
  return value.toFixed(digits).replace("-", "−");
}

export function signed(value, digits = 2) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  return (value > 0 ? "+" : "") + number(value, digits);
}

export function percent(share, digits = 1) {
  if (share === null || share === undefined || Number.isNaN(share)) return "–";
  const least = 10 ** -(digits + 2);
  return share > 0 && share < least ? `< ${(100 * least).toFixed(digits)} %` : `${(100 * share).toFixed(digits)} %`;
}

export function size(bytes) {
  if (bytes === null || bytes === undefined) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (bytes >= 1024 && at < units.length - 1) { bytes /= 1024; at += 1; }
  return `${at ? bytes.toFixed(1) : bytes} ${units[at]}`;
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 1) return `${(value * 1000).toFixed(0)} ms`;
  if (value < 120) return `${value.toFixed(1)} s`;
  if (value < 7200) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
  return `${Math.floor(value / 3600)} h ${Math.round((value % 3600) / 60)} min`;
}

export function clock(iso) {
  return iso ? `${iso.slice(0, 19).replace("T", " ")} UTC` : "–";
}

// Spaces and line ends of a token, made visible.
export function shown(piece) {
  return piece.replace(/\n/g, "⏎").replace(/\t/g, "⇥");
}

// The text with every character that could steer or reorder a line as a symbol or a code, as the server shows what a
// model wrote; line ends and tabs stay.
export function visible(text) {
  return text.replace(STEERING, (character) => {
    const code = character.codePointAt(0);
    if (code < 0x20) return String.fromCodePoint(0x2400 + code);
    if (code === 0x7f) return "␡";
    return code <= 0xffff ? `\\u${code.toString(16).padStart(4, "0")}` : `\\U${code.toString(16).padStart(8, "0")}`;
  });
}

export function short(text, length) {
  return text.length > length ? `${text.slice(0, length - 1)}…` : text;
}

// A value of a table's cell.
export function cell(value, kind) {
  if (value === null || value === undefined) return "–";
  if (kind === "flag") return value ? "yes" : "";
  if (kind === "time") return clock(value);
  if (typeof value === "number") return Number.isInteger(value) ? count(value) : number(value);
  return String(value);
}
