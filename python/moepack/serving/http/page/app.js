// The chat: conversations, messages, the composer and the settings.
//
// A conversation is `{id, title, updated, messages}`. A message is `{role, text}`; an answer also has its `reasoning`,
// how it ended (`error`, `stopped`, `finish`), and its `stats`. Answers of several conversations can run at a time.

import { describe, stream } from "./api.js";
import { copy, el, icon, iconButton } from "./dom.js";
import { render } from "./markdown.js";
import * as store from "./store.js";

const $ = (selector) => document.querySelector(selector);
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "max_tokens"];
const SAVE_EVERY = 1000; // milliseconds between saves of a running answer
const THEMES = ["", "light", "dark"];
const IDEAS = {
  chat: ["Explain mixture-of-experts models in five sentences", "Write a Python function that merges two sorted lists", "Compare tea and coffee in a table"],
  text: ["She opened the door and saw", "Once upon a time", "The most important thing about the sea is"],
};

let settings = store.loadSettings();
let server = null; // what `describe` returned; null until the server answered
let connection = null; // the promise of the last `connect`
let wantsKey = false; // whether the server has refused a request without a key
let keyBefore = ""; // the key when the drawer was opened
let chat = store.chats().find((found) => found.id === location.hash.slice(1)) ?? store.newChat();
const running = new Map(); // AbortControllers by the id of the conversation
let leaves = false; // whether the page is being closed, which ends its requests
let follows = true; // whether the view follows the end of the conversation

// Server

function connect() {
  connection = reach();
}

async function reach() {
  notice("");
  try {
    server = await describe(settings.key);
  } catch (error) {
    server = null;
    if (error.status === 401) {
      wantsKey = true;
      notice(settings.key ? "The API key is wrong." : "This server asks for an API key.", "Enter the key", askForKey);
    } else notice(error.message, "Try again", connect);
  }
  const names = server?.models ?? [];
  $("#model").replaceChildren(...names.map((name) => el("option", {}, name)));
  $("#model").value = names.includes(settings.model) ? settings.model : (names[0] ?? "");
  document.title = names.length ? `${$("#model").value} - moepack` : "moepack";
  draw();
}

/** Act on the conversation once the server has answered: keys and clicks before that are not lost. */
async function connected(action) {
  const own = chat;
  await connection;
  if (server && own === chat && !running.has(own.id)) action();
}

function notice(text, action, onclick) {
  $("#notice").hidden = !text;
  $("#notice").replaceChildren(text, ...(action ? [el("button", { type: "button", onclick }, action)] : []));
}

function askForKey() {
  openDrawer();
  $("#drawer [name=key]").focus();
}

// Conversations

function show(next) {
  chat = next;
  history.replaceState(null, "", chat.messages.length ? `#${chat.id}` : location.pathname);
  follows = true;
  document.body.classList.remove("side");
  $("#log").replaceChildren();
  draw();
  toEnd();
}

function newConversation() {
  show(store.newChat());
  $("#text").focus();
}

function save(saved) {
  if (!saved.messages.length) return;
  saved.title ||= saved.messages[0].text.trim().split("\n")[0].slice(0, 80);
  if (!store.saveChat(saved)) notice("The browser's storage is full: delete conversations to keep new ones.");
}

function remove(removed) {
  if (!confirm(`Delete “${removed.title}”?`)) return;
  running.get(removed.id)?.abort();
  store.removeChat(removed.id);
  if (removed.id === chat.id) newConversation();
  else drawList();
}

function clear() {
  if (!confirm("Delete all conversations?")) return;
  for (const controller of running.values()) controller.abort();
  for (const each of store.chats()) store.removeChat(each.id);
  $("#drawer").close();
  newConversation();
}

// Answers

/** Return the path and the body of the request for the next answer. */
function request() {
  const body = { model: $("#model").value };
  for (const name of NUMBERS) if (settings[name] != null) body[name] = settings[name];
  if (settings.stop?.length) body.stop = settings.stop;
  const said = chat.messages.filter((message) => message.role === "user" || message.text);
  if (!server.chats) return ["v1/completions", { ...body, prompt: said.map((message) => message.text).join("") }];
  const messages = [];
  for (const { role, text } of said) {
    // After an answer without text, two questions follow each other, which some templates refuse.
    if (messages.at(-1)?.role === role) messages.at(-1).content += `\n\n${text}`;
    else messages.push({ role, content: text });
  }
  if (settings.system?.trim()) messages.unshift({ role: "system", content: settings.system });
  return ["v1/chat/completions", { ...body, messages }];
}

/** Ask for an answer to the conversation, and show it while it grows. */
async function answer() {
  const [path, body] = request();
  const [own, message, controller] = [chat, { role: "assistant", text: "", model: body.model }, new AbortController()];
  own.messages.push(message);
  own.updated = Date.now();
  running.set(own.id, controller);
  save(own);
  history.replaceState(null, "", `#${own.id}`);
  follows = true;
  draw();
  const times = { start: performance.now() };
  let saved = times.start;
  try {
    for await (const event of stream(path, settings.key, controller.signal, body)) {
      take(message, event, times);
      if (performance.now() - saved > SAVE_EVERY && running.get(own.id) === controller) {
        saved = performance.now();
        save(own);
      }
      if (own === chat) drawSoon();
    }
  } catch (error) {
    if (controller.signal.aborted) message.stopped = true;
    else if (!leaves) message.error = error.message;
    if (error.status === 401) connect();
  }
  delete message.raw;
  delete message.thought;
  if (running.get(own.id) === controller) running.delete(own.id);
  if (store.loadChat(own.id)) save(own); // it may have been deleted
  if (own === chat) $("#said").textContent = message.error ?? "The answer is complete";
  draw();
}

/** Add an event of the stream to a message. */
function take(message, event, times) {
  const now = performance.now();
  const choice = event.choices[0];
  const piece = choice?.delta?.content ?? choice?.text ?? "";
  const thought = choice?.delta?.reasoning_content ?? "";
  if (piece || thought) {
    times.first ??= now;
    times.pieces = (times.pieces ?? 0) + 1;
    message.raw = (message.raw ?? "") + piece;
    message.thought = (message.thought ?? "") + thought;
    Object.assign(message, split(message.raw));
    message.reasoning = message.thought + (message.reasoning ?? "");
    times.last = now;
  }
  if (choice?.finish_reason) message.finish = choice.finish_reason;
  const tokens = event.usage?.completion_tokens ?? times.pieces ?? 0;
  // The first token takes the prompt's time, so the rate counts the tokens after it, unless all arrived at once.
  const { start, first = now, last = now } = times;
  const rate = last > first ? ((tokens - 1) * 1000) / (last - first) : (tokens * 1000) / (last - start || 1);
  message.stats = { tokens, rate, first: first - start, prompt: event.usage?.prompt_tokens };
}

/** Split reasoning in think tags from the text. Some templates open the tag in the prompt. */
function split(raw) {
  const text = raw.trimStart();
  const end = text.indexOf("</think>");
  const opened = text.startsWith("<think>");
  if (end < 0) return opened ? { reasoning: text.slice(7), text: "" } : { reasoning: "", text: raw };
  return { reasoning: text.slice(opened ? 7 : 0, end).trim(), text: text.slice(end + 8).trimStart() };
}

function send(text) {
  const open = chat.messages.at(-1);
  if (open?.role === "user") open.text = text; // an answer that never came
  else chat.messages.push({ role: "user", text });
  answer();
}

function stop() {
  running.get(chat.id)?.abort();
}

/** Forget an answer and what follows it, and ask again. */
function retry(index) {
  connected(() => {
    chat.messages.length = index;
    answer();
  });
}

/** Replace a message with a field to edit it. */
function edit(index, element) {
  const area = el("textarea", { value: chat.messages[index].text, "aria-label": "Edit the message" });
  const close = () => {
    element.edits = false;
    element.shown = null;
    draw();
    $("#text").focus();
  };
  const done = () =>
    connected(() => {
      if (!element.edits || !area.value.trim()) return;
      chat.messages.length = index;
      element.edits = false;
      element.shown = null;
      send(area.value);
      $("#text").focus();
    });
  area.onkeydown = (event) => {
    if (event.key === "Escape") {
      event.stopPropagation();
      close();
    } else if (isSend(event)) {
      event.preventDefault();
      done();
    }
  };
  const button = (text, onclick, className = "") => el("button", { type: "button", className, onclick }, text);
  element.edits = true;
  element.replaceChildren(
    el("div", { className: "editor" }, area, el("div", {}, button("Cancel", close), button("Send", done, "primary"))),
  );
  area.focus();
  fit(area);
  area.oninput = () => fit(area);
}

// Drawing

let waits = false;

/** Draw before the next frame. */
function drawSoon() {
  if (waits) return;
  waits = true;
  requestAnimationFrame(() => {
    waits = false;
    drawMessages();
  });
}

function draw() {
  drawMessages();
  drawList();
  const isRunning = running.has(chat.id);
  const button = $("#send");
  button.classList.toggle("stop", isRunning);
  button.querySelector("use").setAttribute("href", isRunning ? "#i-stop" : "#i-send");
  button.setAttribute("aria-label", isRunning ? "Stop" : "Send");
  button.title = isRunning ? "Stop (Esc)" : "Send (Enter)";
  button.disabled = !isRunning && (!server || !$("#text").value.trim());
  const name = $("#model").value;
  $("#text").placeholder = !server ? "Not connected" : server.chats ? `Message ${name}` : `A text that ${name} continues`;
  $("#empty").hidden = chat.messages.length > 0;
  $("#empty h1").textContent = name || "moepack";
  $("#empty p").textContent = !server
    ? ""
    : server.chats
      ? "What can I help with?"
      : "This model has no chat template: it continues your text.";
  const ideas = server ? IDEAS[server.chats ? "chat" : "text"] : [];
  $("#ideas").replaceChildren(
    ...ideas.map((idea) => el("button", { type: "button", onclick: () => connected(() => send(idea)) }, idea)),
  );
}

function drawMessages() {
  const log = $("#log");
  chat.messages.forEach((message, index) => {
    let element = log.children[index];
    if (element?.role_ !== message.role) {
      const next = el("article", { className: message.role, role_: message.role });
      if (element) element.replaceWith(next);
      else log.append(next);
      element = next;
    }
    if (element.edits) return;
    if (message.role === "user") drawQuestion(element, message, index);
    else drawAnswer(element, message, index);
  });
  while (log.children.length > chat.messages.length) log.lastElementChild.remove();
  drawContext();
  if (follows) toEnd();
}

function drawQuestion(element, message, index) {
  if (element.shown === message.text) return;
  element.shown = message.text;
  const copies = iconButton("copy", "Copy", () => copy(message.text, copies));
  element.replaceChildren(
    el("div", { className: "bubble" }, message.text),
    el("div", { className: "actions" }, copies, iconButton("edit", "Edit", () => edit(index, element))),
  );
}

function drawAnswer(element, message, index) {
  const isRunning = running.has(chat.id) && index === chat.messages.length - 1;
  if (!element.body) {
    element.body = el("div", { className: "markdown" });
    element.thought = el("div", { className: "markdown" });
    element.summary = el("summary");
    element.details = el("details", { className: "reasoning" }, element.summary, element.thought);
    element.foot = el("footer");
    element.append(element.details, element.body, element.foot);
  }
  element.classList.toggle("running", isRunning);
  element.classList.toggle("thinking", isRunning && !message.text);
  element.classList.toggle("waiting", isRunning && !message.text && !message.reasoning);
  element.details.hidden = !message.reasoning;
  element.summary.textContent = isRunning && !message.text ? "Thinking…" : "Reasoning";
  render(element.thought, message.reasoning ?? "");
  render(element.body, message.text);
  const state = JSON.stringify([isRunning, message.error, message.stopped, message.finish, message.stats, index]);
  if (element.state === state) return;
  element.state = state;
  const copies = iconButton("copy", "Copy the answer", () => copy(message.text, copies));
  const problem = message.error ? el("p", { className: "error", role: "alert" }, message.error) : null;
  element.foot.replaceChildren(
    ...[problem].filter(Boolean),
    el(
      "div",
      { className: "actions" },
      ...(isRunning || !message.text ? [] : [copies]),
      ...(isRunning ? [] : [iconButton("retry", "Ask again", () => retry(index))]),
      el("span", { className: "stats" }, statistics(message, isRunning)),
    ),
  );
}

function statistics({ stats, stopped, finish, error }, isRunning) {
  const parts = [];
  if (stats?.tokens) {
    parts.push(`${number(stats.tokens)} ${stats.tokens === 1 ? "token" : "tokens"}`);
    if (stats.rate) parts.push(`${stats.rate.toFixed(stats.rate < 10 ? 1 : 0)} tokens/s`);
    if (!isRunning) parts.push(`first after ${seconds(stats.first)}`);
  }
  if (stopped) parts.push("stopped");
  else if (!isRunning && finish === "length") parts.push("cut at the longest length");
  else if (!isRunning && !finish && !error) parts.push("interrupted");
  return parts.join(" · ");
}

const seconds = (milliseconds) =>
  milliseconds < 995 ? `${Math.round(milliseconds)} ms` : `${(milliseconds / 1000).toFixed(1)} s`;

function drawContext() {
  const last = chat.messages.findLast((message) => message.stats?.tokens);
  const known = chat.messages.findLast((message) => message.stats?.prompt);
  $("#context").hidden = !server || !last;
  if (!server || !last) return;
  // While an answer is running, only its own tokens are counted yet.
  const before = last.stats.prompt ?? (known ? known.stats.prompt + known.stats.tokens : 0);
  const used = before + last.stats.tokens;
  $("#context progress").value = used / server.context;
  $("#context").classList.toggle("full", used > 0.9 * server.context);
  $("#context span").textContent = `${number(used)} / ${number(server.context)}`;
  $("#context").title = `${number(used)} of ${number(server.context)} tokens of context in use`;
}

function drawList() {
  const all = store.chats();
  $("#chats").replaceChildren(
    ...all.map((each) => {
      const open = el("button", { type: "button", className: "open", onclick: () => show(each.id === chat.id ? chat : (kept(each) ?? each)) }, each.title);
      if (each.id === chat.id) open.setAttribute("aria-current", "true");
      const row = el("li", {}, open, iconButton("bin", `Delete “${each.title}”`, () => remove(each)));
      row.classList.toggle("running", running.has(each.id));
      return row;
    }),
  );
  for (const each of [...live.keys()]) if (!running.has(each)) live.delete(each);
  if (running.has(chat.id)) live.set(chat.id, chat);
}

const live = new Map(); // conversations whose answer is running, so that it is continued when one comes back to them
const kept = (each) => live.get(each.id);

const number = (value) => value.toLocaleString("en");

function toEnd() {
  $("#scroll").scrollTop = $("#scroll").scrollHeight;
}

// Settings

function openDrawer() {
  const form = $("#drawer form");
  for (const name of ["system", "key", ...NUMBERS]) form.elements[name].value = settings[name] ?? "";
  keyBefore = settings.key ?? "";
  $("#key").hidden = !wantsKey && !settings.key;
  form.elements.stop.value = (settings.stop ?? []).join("\n");
  $("#drawer").showModal();
}

/** Keeps settings while they are typed: the event of closing may come after the next click. */
function keepSettings() {
  const fields = $("#drawer form").elements;
  const stop = fields.stop.value.split("\n").filter(Boolean);
  settings = { ...settings, system: fields.system.value, key: fields.key.value.trim(), stop };
  for (const name of NUMBERS) {
    const { value, valueAsNumber, validity } = fields[name];
    settings[name] = value === "" || !validity.valid ? null : valueAsNumber;
  }
  store.saveSettings(settings);
}

function closeDrawer() {
  if ((settings.key ?? "") !== keyBefore || !server) connect();
}

function setTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
  $("#theme span").textContent = { light: "Light theme", dark: "Dark theme" }[theme] ?? "System theme";
}

// Events

const isSend = (event) => event.key === "Enter" && !event.shiftKey && !event.isComposing;

function fit(area) {
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight}px`;
}

function submit() {
  connected(() => {
    const text = $("#text").value;
    if (!text.trim()) return;
    $("#text").value = "";
    fit($("#text"));
    send(text);
  });
}

$("#composer").onsubmit = (event) => {
  event.preventDefault();
  if (running.has(chat.id)) stop();
  else submit();
};
$("#text").oninput = () => {
  fit($("#text"));
  draw();
};
$("#text").onkeydown = (event) => {
  if (!isSend(event)) return;
  event.preventDefault();
  submit();
};
$("#scroll").onscroll = () => {
  const { scrollTop, scrollHeight, clientHeight } = $("#scroll");
  follows = scrollHeight - scrollTop - clientHeight < 40;
  $("#latest").hidden = follows;
};
$("#latest").onclick = toEnd;
$("#new").onclick = newConversation;
$("#side-open").onclick = () => document.body.classList.toggle(innerWidth > 760 ? "wide" : "side");
$("#side-close").onclick = $("#shade").onclick = () => document.body.classList.remove("side");
$("#drawer-open").onclick = openDrawer;
$("#drawer form").oninput = keepSettings;
$("#drawer").onclose = closeDrawer;
$("#drawer").onclick = (event) => {
  if (event.target === $("#drawer")) $("#drawer").close();
};
$("#clear").onclick = clear;
$("#model").onchange = () => {
  settings.model = $("#model").value;
  store.saveSettings(settings);
  draw();
};
$("#theme").onclick = () => {
  const theme = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme ?? "") + 1) % THEMES.length];
  store.saveTheme(theme);
  setTheme(theme);
};
document.onkeydown = (event) => {
  if (event.key === "Escape" && !$("#drawer").open) {
    stop();
    document.body.classList.remove("side");
  } else if (event.altKey && event.code === "KeyN") {
    event.preventDefault();
    newConversation();
  }
};
window.onbeforeunload = () => {
  leaves = true;
};
window.onpagehide = () => {
  for (const each of live.values()) save(each);
};
window.onstorage = (event) => {
  if (!store.isChat(event.key)) return;
  if (!running.has(chat.id) && chat.messages.length) chat = store.loadChat(chat.id) ?? store.newChat();
  draw();
};

setTheme(document.documentElement.dataset.theme ?? "");
show(chat);
connect();
