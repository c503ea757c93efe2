// Keeps conversations and settings in the browser's storage.
//
// Each conversation has its own entry, so that several tabs of the page overwrite only what both change.

const CHAT = "moepack.chat.";
const SETTINGS = "moepack.settings";

function read(name) {
  try {
    return JSON.parse(localStorage.getItem(name));
  } catch {
    return null; // the browser blocks storage, or other code wrote the entry
  }
}

/** Save a value; return whether there was room for it. */
function write(name, value) {
  try {
    localStorage.setItem(name, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

/** Return a new conversation without messages. It is saved once it has some. */
export function newChat() {
  const id = Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");
  return { id, title: "", updated: Date.now(), messages: [] };
}

/** Return all saved conversations, the last used first. */
export function chats() {
  let names = [];
  try {
    names = Object.keys(localStorage).filter((name) => name.startsWith(CHAT));
  } catch {
    // The browser blocks storage.
  }
  const found = names.map(read).filter((chat) => chat?.id && Array.isArray(chat.messages));
  return found.sort((a, b) => b.updated - a.updated);
}

export const isChat = (name) => name === null || name.startsWith(CHAT);
export const loadChat = (id) => read(CHAT + id);
export const saveChat = (chat) => write(CHAT + chat.id, chat);
export const loadSettings = () => read(SETTINGS) ?? {};
export const saveSettings = (settings) => write(SETTINGS, settings);

export function removeChat(id) {
  try {
    localStorage.removeItem(CHAT + id);
  } catch {
    // The browser blocks storage.
  }
}

export function saveTheme(theme) {
  try {
    if (theme) localStorage.setItem("moepack.theme", theme);
    else localStorage.removeItem("moepack.theme");
  } catch {
    // The browser blocks storage.
  }
}
