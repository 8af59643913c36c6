// The list of earlier chats, beside the window: searched, opened, renamed and deleted.

const ACTS = ["open", "rename", "remove"]; // what the buttons of a row do
const find = (act, name) =>
  [...document.querySelectorAll(`#chats [data-${act}]`)].find((b) => b.dataset[act] === name);

let all = []; // the latest first
let isBroken = false; // nothing can be kept
let trouble = ""; // why, or what cannot be taken over
let isStale = false;
let isReading = false;
async function readList() {
  isStale = true;
  if (isReading) return;
  isReading = true;
  while (isStale) {
    isStale = false;
    await readOnce();
    await new Promise((resolve) => setTimeout(resolve, 100)); // an import changes it many times
  }
  isReading = false;
}

async function readOnce() {
  try {
    trouble = await store.check();
    all = await store.list();
    isBroken = false;
  } catch (error) {
    console.warn(error);
    trouble = `The browser keeps no chats: ${store.reason(error)}`;
    all = [];
    isBroken = true;
  }
  showChats();
}

let listed = ""; // the rows as they are
let nth = 0; // another search may begin before one ends
async function showChats() {
  const words = wanted();
  const mine = ++nth;
  const list = words.length ? await search(words, () => mine === nth) : all;
  const box = document.querySelector("#chats .chats");
  const ul = box?.querySelector("ul");
  if (!ul || mine !== nth || ul.querySelector("input")) return; // a title is being written
  box.querySelector(".none").hidden = all.length > 0 || isBroken;
  box.querySelector("[type=search]").hidden = !all.length;
  const number = words.length ? `${list.length} of ${all.length}` : "";
  put(box.querySelector(".found"), number);
  put(box.querySelector(".trouble"), trouble && `${trouble}.`);
  box.querySelector("[type=checkbox]").checked = store.areKept() && !isBroken;
  box.querySelector("[type=checkbox]").disabled = isBroken;
  box.querySelector("[data-all=export]").disabled = !all.length;
  box.querySelector("[data-all=import]").disabled = isBroken || !store.areKept();
  const rows = list.map(({ name, title, at }) => [name, title, when.format(at), name === own()]);
  // A row that is made anew has neither the focus nor the pointer that is just pressed on it.
  if (JSON.stringify(rows) === listed && ul.children.length === rows.length) return;
  listed = JSON.stringify(rows);
  const focused = ul.contains(document.activeElement) ? document.activeElement.dataset : {};
  ul.replaceChildren(...rows.map((chat) => row(...chat)));
  for (const act of ACTS) if (act in focused) find(act, focused[act])?.focus();
}
const when = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "short" });
// A screen reader is told of each change.
const put = (place, text) => place.textContent !== text && (place.textContent = text);

function row(name, title, date, isOwn) {
  const row = document.createElement("li");
  const [open, change, remove] = ACTS.map((act) => {
    const button = document.createElement("button");
    button.dataset[act] = name;
    return button;
  });
  open.textContent = title || "Without words";
  open.title = `${title}\n${date}`;
  open.dir = "auto";
  if (isOwn) open.ariaCurrent = "true";
  change.textContent = "✎";
  change.title = "Rename";
  change.ariaLabel = `Rename ${title}`;
  remove.textContent = "×";
  remove.title = "Delete";
  remove.ariaLabel = `Delete ${title}`;
  row.append(open, change, remove);
  return row;
}

// Searched are titles and all that was said, files included; each word is to be somewhere.
const inLower = (text) => text.normalize().toLocaleLowerCase();
const wanted = () => {
  const field = document.querySelector("#chats [type=search]");
  return inLower(field?.value ?? "").match(/\S+/g) ?? [];
};

async function search(words, goesOn) {
  const found = [];
  for (const chat of all) {
    const title = inLower(chat.title);
    const left = words.filter((word) => !title.includes(word));
    const text = left.length ? await textIn(chat) : "";
    if (!goesOn()) break;
    if (left.every((word) => text.includes(word))) found.push(chat);
  }
  return found;
}

// What was read is remembered, up to so many characters.
const MOST_READ = 5e7;
const texts = new Map(); // by version
let nRead = 0;
async function textIn({ name, version }) {
  const before = texts.get(version);
  if (before !== undefined) return before;
  const text = allSaid((await store.text(name)) ?? "[]");
  if (nRead + text.length > MOST_READ) {
    texts.clear();
    nRead = 0;
  }
  texts.set(version, text);
  nRead += text.length;
  return text;
}

function allSaid(kept) {
  try {
    const parts = JSON.parse(kept).flatMap(({ user, files, reply }) => [
      user,
      ...(files ?? []).flatMap((file) => [file.name, file.text]),
      (reply?.pieces ?? []).map(([piece]) => piece).join(""),
    ]);
    return inLower(parts.join("\n"));
  } catch (error) {
    console.warn(error); // it was kept by another program
    return "";
  }
}

// The title becomes a field. Enter, or leaving it, keeps what stands there; Escape does not.
function writeTitle(name) {
  const open = find("open", name);
  const chat = all.find((other) => other.name === name);
  if (!open || !chat) return;
  const { title } = chat;
  const field = document.createElement("input");
  field.value = title;
  field.ariaLabel = "Title";
  field.dir = "auto";
  open.replaceWith(field);
  field.select();
  const close = (isKept) => {
    field.onblur = null; // it is left by being removed, too
    const hadFocus = document.activeElement === field;
    const given = asTitle(field.value);
    field.remove();
    if (isKept && given !== title) {
      chat.title = given || title; // at once
      rename(name, given).catch(lament);
    }
    listed = "";
    showChats();
    if (hadFocus) (find("rename", name) ?? document.querySelector("#chats [type=search]")).focus();
  };
  field.onblur = () => close(true);
  field.onkeydown = (event) => {
    const { key, isComposing } = event;
    if ((key !== "Enter" && key !== "Escape") || isComposing) return;
    event.preventDefault(); // or it would press the button that gets the focus
    close(key === "Enter");
  };
}

function deleteChat(button) {
  const { remove: name } = button.dataset;
  const row = button.closest("li");
  const { textContent: title } = row.querySelector("[data-open]");
  if (!confirm(`Delete the chat “${title}”?`)) return;
  const beside = row.nextElementSibling ?? row.previousElementSibling;
  const other = beside?.querySelector("[data-remove]").dataset.remove;
  const isOwn = name === own();
  if (isOwn) beOfNone();
  ofTab?.removeItem(draftKey(name));
  all = all.filter((chat) => chat.name !== name); // at once
  keeping.then(() => store.remove(name)).catch(lament);
  showChats();
  (find("remove", other) ?? document.querySelector("#chats [type=checkbox]"))?.focus();
  if (!isOwn) return;
  isDeleted = !isEmpty();
  document.querySelector("#new").click();
}

function lament(error) {
  console.warn(error);
  refuse(`The browser did not take that: ${store.reason(error)}.`);
}

document.addEventListener("click", ({ target }) => {
  const button = target.closest("#chats button");
  if (button?.dataset.open) openChat(button.dataset.open);
  if (button?.dataset.rename) writeTitle(button.dataset.rename);
  if (button?.dataset.remove) deleteChat(button);
});
document.addEventListener("keydown", ({ key, target }) => {
  const row = key === "F2" && target.closest("#chats li");
  if (row) writeTitle(row.querySelector("[data-open]")?.dataset.open);
});
document.addEventListener("input", ({ target }) => {
  if (!target.matches("#chats [type=search]")) return;
  ofTab?.setItem("search", target.value); // opening a chat loads the page again
  showChats();
});

document.addEventListener("change", ({ target }) => {
  if (!target.matches("#chats [type=checkbox]")) return;
  const forgets = `Forget ${all.length === 1 ? "the chat" : `all ${all.length} chats`} kept so far?`;
  if (target.checked) store.switchTo(true).then(showChats);
  else if (all.length && !confirm(forgets)) target.checked = true;
  else forgetAll(all).catch(lament);
});

function beginList() {
  const search = document.querySelector("#chats [type=search]");
  if (!search) return;
  search.value = ofTab?.getItem("search") ?? "";
  showChats();
}
document.addEventListener("chats", beginList); // where they are to be shown there is room now
document.addEventListener("chats-changed", readList); // here, or in another tab
beginList();
readList();
