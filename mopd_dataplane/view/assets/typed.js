// What a person types into the filter may be a whole question: a condition, a search in the answers, and an order.
//
//   reward < 0.5 and regexp_matches(response, '9{3}') order by kl desc

const SEARCH = /^regexp_matches\s*\(\s*response\s*,\s*('(?:[^']|'')*')\s*\)$/i;
const ORDER = /^order\s+by\s+("(?:[^"]|"")*"|[a-z_]\w*)(?:\s+(asc|desc))?$/i;

// The words of SQL outside quotes and parentheses, each with where it begins and ends.
function outerWords(sql) {
  const words = [];
  let depth = 0;
  for (const token of sql.matchAll(/'(?:[^']|'')*'?|"(?:[^"]|"")*"?|--[^\n]*|[()]|\w+/g)) {
    const [text] = token;
    if (text === "(") depth += 1;
    else if (text === ")") depth -= 1;
    else if (!depth && /^\w/.test(text)) words.push({ word: text.toLowerCase(), from: token.index, to: token.index + text.length });
  }
  return words;
}

// The parts of a condition between its outermost "and"; the one part that it is where an "or" stands beside them.
function conjuncts(sql) {
  const words = outerWords(sql);
  if (words.some(({ word }) => word === "or")) return [sql];
  const ands = words.filter(({ word }) => word === "and");
  return [...ands, { from: sql.length }].map(({ from }, i) => sql.slice(i ? ands[i - 1].to : 0, from).trim());
}

// w: the condition. q: the expression of the search, and order: "column" or "-column", where the text has them; what
// is none of these stays in w, for the server to refuse.
export function typed(sql) {
  const by = outerWords(sql).findLast(({ word }, i, words) => word === "order" && words[i + 1]?.word === "by");
  const order = by && sql.slice(by.from).trim().match(ORDER);
  const parts = conjuncts(order ? sql.slice(0, by.from) : sql);
  const search = parts.findIndex((part) => SEARCH.test(part));
  const asked = { w: (search < 0 ? parts : parts.toSpliced(search, 1)).join(" and ").trim() };
  if (search >= 0) asked.q = unquoted(parts[search].match(SEARCH)[1]);
  if (order) asked.order = (order[2]?.toLowerCase() === "desc" ? "-" : "") + unquoted(order[1]);
  return asked;
}

const unquoted = (text) => (/^['"]/.test(text) ? text.slice(1, -1).replaceAll(text[0] + text[0], text[0]) : text);
