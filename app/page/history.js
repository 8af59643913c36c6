// Earlier chats: the browser keeps them, each under a name, and a list of these with titles, the latest
// first. The tab knows which is its own. Whatever else was served at this address had the same storage.
// chats.js shows the list.

const CHATS = "speculation:chats";
const SWITCH = "speculation:keeps-chats";
const MOST_CHATS = 100;
const textKey = (name) => `speculation:chat:${name}`;

// Where the browser is told to keep nothing, they throw when they are asked for.
let stored = null;
let ofTab = null;
try {
  stored = localStorage;
  ofTab = sessionStorage;
} catch (error) {
  console.warn(error);
}

const isChat = (chat) =>
  typeof chat?.name === "string" && typeof chat.title === "string" && Number.isFinite(chat.at);

function chats() {
  try {
    const found = JSON.parse(stored?.getItem(CHATS) ?? "[]");
    return Array.isArray(found) ? found.filter(isChat) : [];
  } catch (error) {
    console.warn(error);
    return [];
  }
}

const areKept = () => stored !== null && stored.getItem(SWITCH) !== "no";
const own = () => ofTab?.getItem("chat") ?? null;

function forget(list, unwanted) {
  for (const { name } of unwanted) {
    stored.removeItem(textKey(name));
    ofTab?.removeItem(draftKey(name));
  }
  const left = list.filter((chat) => !unwanted.includes(chat));
  stored.setItem(CHATS, JSON.stringify(left));
  return left;
}

let known = ofTab?.getItem("conversation") ?? ""; // what this tab kept or opened last
let isUndone = false; // what is said next takes the place of what was undone
let isDeleted = false; // what comes before the next chat begins is unwanted

function keepChat(text) {
  if (!text) isDeleted = false;
  if (!text && isUndone) return;
  isUndone = false;
  const before = known;
  known = text;
  if (text === before || isDeleted) return; // it was only loaded again
  if (!text || !areKept()) {
    ofTab?.removeItem("chat"); // what is said next begins another
    return;
  }
  let name = own();
  // What another tab made of it meanwhile stays.
  const other = name && stored.getItem(textKey(name));
  if (!name || (other && before && other !== before)) {
    name = `${Date.now()}-${Math.random().toString(36).slice(2, 8)}`;
    ofTab.setItem("chat", name);
  }
  const { title, named } = chats().find((chat) => chat.name === name) ?? {};
  store({ name, title: named ? title : titleOf(text), named, at: Date.now() }, text);
}

// What was said first in a chat, as long as it was given no other.
function titleOf(text) {
  const [{ user, files }] = JSON.parse(text);
  return asTitle(user || files?.[0]?.name || "");
}

function asTitle(text) {
  return [...text.slice(0, 1000).trim().replace(/\s+/g, " ")].slice(0, 80).join("");
}

// One that is empty makes way for what was said first.
function rename(name, title) {
  const list = chats();
  const chat = list.find((other) => other.name === name);
  if (!chat) return; // another tab deleted it
  chat.named = title !== "";
  chat.title = title || titleOf(stored.getItem(textKey(name)) ?? "[{}]");
  stored.setItem(CHATS, JSON.stringify(list));
}

// Where there is no room the oldest make way; not for one that has no room even so.
function store(chat, text) {
  const list = chats();
  const gone = [];
  let left = list.filter(({ name }) => name !== chat.name);
  for (;;) {
    try {
      if (left.length < MOST_CHATS) {
        stored.setItem(CHATS, JSON.stringify([chat, ...left]));
        stored.setItem(textKey(chat.name), text);
        return;
      }
    } catch (error) {
      if (!left.length) {
        for (const [key, value] of gone) stored.setItem(key, value);
        stored.setItem(CHATS, JSON.stringify(list));
        throw error;
      }
    }
    const key = textKey(left.at(-1).name);
    gone.push([key, stored.getItem(key) ?? ""]);
    left = forget(left, left.slice(-1));
  }
}

const isEmpty = () => !element.querySelector(".turns > *");
let next = null; // to be opened when the reply that comes has stopped
function openChat(name) {
  const text = stored.getItem(textKey(name));
  if (!text || (name === own() && !isEmpty())) return;
  const stop = isBusy() && next === null && document.querySelector("#box .stop-button");
  if (stop) {
    next = name;
    stop.click();
    return;
  }
  try {
    keepDraft(own(), written());
    ofTab.setItem("conversation", text);
    exchangeDrafts(name);
  } catch (error) {
    console.warn(error);
    alert("This tab has no room for that chat; open it in another.");
    return;
  }
  // What the page would still keep of the present one is there already, and the server reads the
  // other when the page is loaded.
  document.documentElement.dataset.leaving = "";
  ofTab.setItem("chat", name);
  location.reload();
}

document.addEventListener("click", ({ target }) => {
  if (target.closest("[data-action=undo]")) isUndone = true;
  if (target.closest("#new")) {
    isUndone = false;
    if (ofTab !== null) beginDraft();
    if (isEmpty()) ofTab?.removeItem("chat");
  }
});

document.addEventListener("kept", ({ detail }) => {
  try {
    keepChat(detail);
  } catch (error) {
    console.warn(error);
  }
  showChats();
  if (next !== null) openChat(next);
});
