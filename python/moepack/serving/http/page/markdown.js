// Shows Markdown as DOM nodes: headings, lists, quotes, tables, code, emphasis, links.
//
// What a model writes is untrusted. Only the elements named here are created, all text becomes text nodes, links are
// limited to http, https and mailto, and images are shown as links, so that reading an answer requests nothing. Nesting
// is bounded by DEEPEST; the scans for closing marks are bounded by a paragraph.

import { copy, el, iconButton } from "./dom.js";

const DEEPEST = 8;
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:\s+(.*?))?(?:\s+#+)?\s*$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?:( +)(.*)|)$/;
const QUOTE = /^ {0,3}> ?/;
const DELIMITERS = /^ {0,3}\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;

/** Show a text in an element. Blocks whose source has not changed keep their nodes, and thus selection and scrolling. */
export function render(target, text) {
  const blocks = parse(text.replace(/\r\n?/g, "\n").replace(/\t/g, "    ").split("\n"), 0);
  blocks.forEach((block, index) => {
    const old = target.children[index];
    if (old?.source === block.source) return;
    const node = block.build();
    node.source = block.source;
    if (old) old.replaceWith(node);
    else target.append(node);
  });
  while (target.children.length > blocks.length) target.lastElementChild.remove();
}

/** Split lines into blocks: the source of each, and a function that creates its node. */
function parse(lines, depth) {
  const blocks = [];
  for (let at = 0; at < lines.length; ) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const start = at;
    const [end, build] = block(lines, at, depth);
    at = end;
    blocks.push({ source: lines.slice(start, end).join("\n"), build });
  }
  return blocks;
}

/** Return the end of the block that starts at a line, and its builder. */
function block(lines, at, depth) {
  const line = lines[at];
  const fence = FENCE.exec(line);
  if (fence) return code(lines, at, fence);
  const heading = HEADING.exec(line);
  if (heading) return [at + 1, () => el(`h${heading[1].length}`, {}, inline(heading[2] ?? ""))];
  if (RULE.test(line)) return [at + 1, () => el("hr")];
  if (depth < DEEPEST && QUOTE.test(line)) return quote(lines, at, depth);
  if (depth < DEEPEST && ITEM.test(line)) return list(lines, at, depth);
  if (line.includes("|") && DELIMITERS.test(lines[at + 1] ?? "")) {
    const head = cells(line);
    if (head.length === cells(lines[at + 1]).length) return table(lines, at, head);
  }
  let end = at + 1;
  while (end < lines.length && !interrupts(lines[end])) end += 1;
  return [end, () => el("p", {}, inline(lines.slice(at, end).map((text) => text.trimStart()).join("\n")))];
}

/** Whether a line ends the paragraph before it. */
function interrupts(line) {
  if (!line.trim() || FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line)) return true;
  const item = ITEM.exec(line);
  return item !== null && Boolean(item[4]) && (!/\d/.test(item[2]) || item[2].startsWith("1"));
}

function code(lines, at, fence) {
  const closes = (line) => line.trim().startsWith(fence[1]) && !line.trim().replaceAll(fence[1][0], "");
  let end = at + 1;
  while (end < lines.length && !closes(lines[end])) end += 1;
  const indent = lines[at].length - lines[at].trimStart().length;
  const text = lines.slice(at + 1, end).map((line) => (line.slice(0, indent).trim() ? line : line.slice(indent)));
  return [Math.min(end + 1, lines.length), () => codeBlock(text.join("\n"), fence[2].trim().split(/\s/)[0])];
}

function codeBlock(text, language) {
  const button = iconButton("copy", "Copy the code", () => copy(text, button));
  const head = el("div", { className: "code-head" }, el("span", {}, language || "text"), button);
  return el("div", { className: "code" }, head, el("pre", { tabIndex: 0 }, el("code", {}, text)));
}

function quote(lines, at, depth) {
  let end = at;
  while (end < lines.length && (QUOTE.test(lines[end]) || (end > at && !interrupts(lines[end])))) end += 1;
  const inner = lines.slice(at, end).map((line) => line.replace(QUOTE, ""));
  return [end, () => el("blockquote", {}, nodes(inner, depth + 1))];
}

const nodes = (lines, depth) => parse(lines, depth).map((found) => found.build());

function list(lines, at, depth) {
  const [, indent, mark, space = " "] = ITEM.exec(lines[at]);
  const kind = (text) => (/\d/.test(text) ? text.at(-1) : text);
  const items = [];
  let width = 0;
  let end = at;
  let loose = false;
  for (; end < lines.length; end += 1) {
    const line = lines[end];
    const item = ITEM.exec(line);
    const spaces = line.length - line.trimStart().length;
    if (!line.trim()) {
      const next = lines[end + 1] ?? "";
      const deeper = next.trim() && next.length - next.trimStart().length >= width;
      const sibling = ITEM.exec(next);
      if (!deeper && !(sibling && kind(sibling[2]) === kind(mark))) break;
      loose ||= !deeper;
      items.at(-1).push("");
    } else if (item && spaces < Math.max(width, indent.length + 1) && kind(item[2]) === kind(mark) && !RULE.test(line)) {
      width = item[1].length + item[2].length + Math.min((item[3] ?? space).length, 4);
      items.push([item[4] ?? ""]);
    } else if (spaces >= width) {
      items.at(-1).push(line.slice(width));
    } else if (interrupts(line) || !lines[end - 1].trim()) {
      break;
    } else {
      items.at(-1).push(line.trimStart());
    }
  }
  const ordered = /\d/.test(mark);
  return [end, () => {
    const made = items.map((inner) => listItem(inner, depth, loose));
    return ordered ? el("ol", { start: parseInt(mark, 10) }, made) : el("ul", {}, made);
  }];
}

function listItem(lines, depth, loose) {
  const task = /^\[([ xX])\] /.exec(lines[0]);
  if (task) lines = [lines[0].slice(4), ...lines.slice(1)];
  const made = nodes(lines, depth + 1);
  // A paragraph of a tight list stands without its own spacing.
  const inner = loose ? made : made.flatMap((node) => (node.tagName === "P" ? [...node.childNodes] : [node]));
  const box = task && el("input", { type: "checkbox", disabled: true, checked: task[1] !== " " });
  return el("li", { className: task ? "task" : "" }, box, inner);
}

const cells = (line) =>
  line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));

function table(lines, at, head) {
  const sides = cells(lines[at + 1]).map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : "left"));
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|") && lines[end].trim()) end += 1;
  const row = (tag, found) => el("tr", {}, head.map((_, i) => el(tag, { className: sides[i] }, inline(found[i] ?? ""))));
  return [end, () => {
    const body = lines.slice(at + 2, end).map((line) => row("td", cells(line)));
    return el("div", { className: "table" }, el("table", {}, el("thead", {}, row("th", head)), el("tbody", {}, body)));
  }];
}

const MARKS = [
  ["**", "strong"],
  ["__", "strong"],
  ["~~", "del"],
  ["*", "em"],
  ["_", "em"],
];
const WORD = /[\p{L}\p{N}]/u;

/** Return the nodes of a paragraph's text. */
function inline(text, depth = 0) {
  const found = [];
  const missing = new Set(); // marks that are known not to close: each is searched once
  let plain = "";
  const put = (node) => {
    if (plain) found.push(plain);
    plain = "";
    found.push(node);
  };
  for (let at = 0; at < text.length; ) {
    const [length, make] = depth < DEEPEST ? span(text, at, depth, missing) : [0];
    const made = length ? make() : text[at];
    if (typeof made === "string") plain += made;
    else put(made);
    at += length || 1;
  }
  if (plain) found.push(plain);
  return found;
}

/** Return the length of the span that starts at a position, and its builder; 0 if the character is plain text. */
function span(text, at, depth, missing) {
  const char = text[at];
  if (char === "\\" && /[!-/:-@[-`{-~]/.test(text[at + 1] ?? "")) return [2, () => text[at + 1]];
  if (char === "\n") return / {2}$/.test(text.slice(Math.max(0, at - 2), at)) ? [1, () => el("br")] : [0];
  if (char === "`") return codeSpan(text, at, missing);
  if (char === "[" || (char === "!" && text[at + 1] === "[")) return link(text, at, depth);
  if (char === "<" || char === "h") return address(text, at);
  for (const [mark, tag] of MARKS) {
    if (!text.startsWith(mark, at) || missing.has(mark)) continue;
    const close = closing(text, at + mark.length, mark);
    if (close < 0) {
      missing.add(mark);
      continue;
    }
    if (/\s/.test(text[at + mark.length]) || (mark[0] === "_" && WORD.test(text[at - 1] ?? ""))) continue;
    return [close + mark.length - at, () => el(tag, {}, inline(text.slice(at + mark.length, close), depth + 1))];
  }
  return [0];
}

/** Return the position of the mark that closes an emphasis, or -1. */
function closing(text, from, mark) {
  for (let at = text.indexOf(mark, from + 1); at >= 0; at = text.indexOf(mark, at + 1)) {
    if (/[\s\\]/.test(text[at - 1])) continue;
    if (mark[0] === "_" && WORD.test(text[at + mark.length] ?? "")) continue;
    if (mark.length === 1 && text[at + 1] === mark) {
      at += 1; // a double mark inside
      continue;
    }
    return mark.length === 2 && text[at + 2] === mark[0] ? at + 1 : at;
  }
  return -1;
}

function codeSpan(text, at, missing) {
  const ticks = /^`+/.exec(text.slice(at, at + 20))[0];
  if (missing.has(ticks)) return [ticks.length, () => ticks];
  for (let end = text.indexOf(ticks, at + ticks.length); end >= 0; end = text.indexOf(ticks, end + 1)) {
    if (text[end + ticks.length] === "`" || text[end - 1] === "`") continue;
    const inner = text.slice(at + ticks.length, end).replaceAll("\n", " ");
    const shown = /^ .*[^ ].* $/.test(inner) ? inner.slice(1, -1) : inner;
    return [end + ticks.length - at, () => el("code", {}, shown)];
  }
  missing.add(ticks);
  return [ticks.length, () => ticks];
}

function link(text, at, depth) {
  const found = /^!?\[((?:[^[\]\\]|\\.|\[[^[\]]*\]){0,400})\]\(\s*<?([^\s<>]{1,2000}?)>?(?:\s+"[^"]{0,400}")?\s*\)/.exec(
    text.slice(at, at + 3000),
  );
  if (!found) return [0];
  const label = found[1] || found[2];
  const href = safe(found[2]);
  return [found[0].length, () => (href ? anchor(href, inline(label, DEEPEST - 2 > depth ? depth + 2 : DEEPEST)) : label)];
}

function address(text, at) {
  if (text[at] === "h" && WORD.test(text[at - 1] ?? "")) return [0];
  const found = /^(?:<(https?:\/\/[^\s<>]+)>|(https?:\/\/[^\s<>"'`]+))/.exec(text.slice(at, at + 2000));
  if (!found) return [0];
  if (found[1]) return [found[0].length, () => anchor(safe(found[1]) ?? "", [found[1]])];
  let shown = found[2].replace(/[.,:;!?*_~]+$/, "");
  if (shown.endsWith(")") && !shown.includes("(")) shown = shown.slice(0, -1);
  const href = safe(shown);
  return href ? [shown.length, () => anchor(href, [shown])] : [0];
}

const anchor = (href, inner) => el("a", { href, target: "_blank", rel: "noopener noreferrer nofollow" }, inner);

/** Return the address if it is absolute and of a harmless scheme, else null. */
function safe(address) {
  try {
    const url = new URL(address);
    return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}
