// Earlier chats: the browser keeps them, each under a name, and a list of these with titles, the latest
// first. The tab knows which is its own. Whatever else was served at this address had the same storage.

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
  for (const chat of unwanted) stored.removeItem(textKey(chat.name));
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
  const [{ user, files }] = JSON.parse(text);
  const said = (user || files?.[0]?.name || "").slice(0, 1000).trim().replace(/\s+/g, " ");
  const title = [...said].slice(0, 80).join("");
  store({ name, title, at: Date.now() }, text);
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

let listed = ""; // the rows as they are
function showChats() {
  const box = document.querySelector("#chats .chats");
  if (!box) return;
  const ul = box.querySelector("ul");
  const when = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "short" });
  const list = chats().map(({ name, title, at }) => [name, title, when.format(at), name === own()]);
  box.querySelector(".none").hidden = list.length > 0;
  box.querySelector("input").checked = areKept();
  box.querySelector("input").disabled = stored === null;
  // A row that is made anew has neither the focus nor the pointer that is just pressed on it.
  if (JSON.stringify(list) === listed && ul.children.length === list.length) return;
  listed = JSON.stringify(list);
  const { open, remove } = ul.contains(document.activeElement) ? document.activeElement.dataset : {};
  ul.replaceChildren(...list.map((chat) => row(...chat)));
  if (open ?? remove) find(open ? "open" : "remove", open ?? remove)?.focus();
}

function row(name, title, date, isOwn) {
  const row = document.createElement("li");
  const open = document.createElement("button");
  open.textContent = title || "Without words";
  open.title = `${title}\n${date}`;
  open.dir = "auto";
  open.dataset.open = name;
  if (isOwn) open.ariaCurrent = "true";
  const remove = document.createElement("button");
  remove.textContent = "×";
  remove.title = "Delete";
  remove.ariaLabel = `Delete ${title}`;
  remove.dataset.remove = name;
  row.append(open, remove);
  return row;
}

const isEmpty = () => !element.querySelector(".turns > *");
const find = (what, name) =>
  [...document.querySelectorAll(`#chats [data-${what}]`)].find((b) => b.dataset[what] === name);

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
    ofTab.setItem("conversation", text);
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

function deleteChat(button) {
  const { remove: name } = button.dataset;
  const row = button.closest("li");
  const { textContent: title } = row.querySelector("[data-open]");
  if (!confirm(`Delete the chat “${title}”?`)) return;
  const list = chats();
  forget(list, list.filter((chat) => chat.name === name));
  const beside = row.nextElementSibling ?? row.previousElementSibling;
  const other = beside?.querySelector("[data-remove]").dataset.remove;
  const isOwn = name === own();
  if (isOwn) ofTab.removeItem("chat");
  showChats();
  (find("remove", other) ?? document.querySelector("#chats input"))?.focus();
  if (!isOwn) return;
  isDeleted = !isEmpty();
  document.querySelector("#new").click();
}

document.addEventListener("click", ({ target }) => {
  if (target.closest("[data-action=undo]")) isUndone = true;
  if (target.closest("#new")) {
    isUndone = false;
    if (isEmpty()) ofTab?.removeItem("chat");
  }
  const button = target.closest("#chats button");
  if (button?.dataset.open) openChat(button.dataset.open);
  if (button?.dataset.remove) deleteChat(button);
});

document.addEventListener("change", ({ target }) => {
  if (!target.matches("#chats input")) return;
  const list = chats();
  const forgets = `Forget ${list.length === 1 ? "the chat" : `all ${list.length} chats`} kept so far?`;
  if (target.checked) stored.removeItem(SWITCH);
  else if (list.length && !confirm(forgets)) target.checked = true;
  else {
    forget(list, list);
    stored.setItem(SWITCH, "no");
  }
  showChats();
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
document.addEventListener("chats", showChats); // where they are to be shown there is room now
window.addEventListener("storage", showChats); // another tab kept some
showChats();
