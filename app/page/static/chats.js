// The list of saved chats in the sidebar: search, open, rename and delete.

const ACTS = ["open", "rename", "remove"]; // the buttons of a row
const find = (act, name) =>
  [...document.querySelectorAll(`#chats [data-${act}]`)].find((b) => b.dataset[act] === name);

let all = []; // latest first
let isBroken = false; // chats cannot be saved
let trouble = ""; // why, or what could not be migrated
let isStale = false;
let isReading = false;
async function readList() {
  isStale = true;
  if (isReading) return;
  isReading = true;
  while (isStale) {
    isStale = false;
    await readOnce();
    await new Promise((resolve) => setTimeout(resolve, 100)); // an import triggers many updates
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
    trouble = `The browser cannot save chats: ${store.reason(error)}`;
    all = [];
    isBroken = true;
  }
  showChats();
}

let listed = ""; // the rows shown, as JSON
let nth = 0; // counts calls: a new search may start before the last one ends
async function showChats() {
  const words = searchWords();
  const mine = ++nth;
  const list = words.length ? await search(words, () => mine === nth) : all;
  const box = document.querySelector("#chats .chats");
  const ul = box?.querySelector("ul");
  if (!ul || mine !== nth || ul.querySelector("input")) return; // a title is being edited
  box.querySelector(".none").hidden = all.length > 0 || isBroken;
  box.querySelector("[type=search]").hidden = !all.length;
  const number = words.length ? `${list.length} of ${all.length}` : "";
  setText(box.querySelector(".found"), number);
  setText(box.querySelector(".trouble"), trouble && `${trouble}.`);
  box.querySelector("[type=checkbox]").checked = store.savesChats() && !isBroken;
  box.querySelector("[type=checkbox]").disabled = isBroken;
  box.querySelector("[data-all=export]").disabled = !all.length;
  box.querySelector("[data-all=import]").disabled = isBroken || !store.savesChats();
  const rows = list.map(({ name, title, at }) => [name, title, when.format(at), name === currentName()]);
  // Replacing a row would lose its focus, and a click that has just begun.
  if (JSON.stringify(rows) === listed && ul.children.length === rows.length) return;
  listed = JSON.stringify(rows);
  const focused = ul.contains(document.activeElement) ? document.activeElement.dataset : {};
  ul.replaceChildren(...rows.map((chat) => row(...chat)));
  for (const act of ACTS) if (act in focused) find(act, focused[act])?.focus();
}
const when = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "short" });
// Screen readers announce every assignment, so only changes are assigned.
const setText = (place, text) => place.textContent !== text && (place.textContent = text);

function row(name, title, date, isOwn) {
  const row = document.createElement("li");
  const [open, change, remove] = ACTS.map((act) => {
    const button = document.createElement("button");
    button.dataset[act] = name;
    return button;
  });
  open.textContent = title || "Untitled";
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

// Searches titles, messages, replies and files. Every word must occur somewhere.
const inLower = (text) => text.normalize().toLocaleLowerCase();
const searchWords = () => {
  const field = document.querySelector("#chats [type=search]");
  return inLower(field?.value ?? "").match(/\S+/g) ?? [];
};

async function search(words, isCurrent) {
  const found = [];
  for (const chat of all) {
    const title = inLower(chat.title);
    const left = words.filter((word) => !title.includes(word));
    const text = left.length ? await textIn(chat) : "";
    if (!isCurrent()) break;
    if (left.every((word) => text.includes(word))) found.push(chat);
  }
  return found;
}

// Texts that were searched are cached.
const CACHE_CHARACTERS = 5e7;
const cache = new Map(); // by version
let nCached = 0;
async function textIn({ name, version }) {
  const cached = cache.get(version);
  if (cached !== undefined) return cached;
  const text = searchableText((await store.text(name)) ?? "[]");
  if (nCached + text.length > CACHE_CHARACTERS) {
    cache.clear();
    nCached = 0;
  }
  cache.set(version, text);
  nCached += text.length;
  return text;
}

function searchableText(saved) {
  try {
    const parts = JSON.parse(saved).flatMap(({ user, files, reply }) => [
      user,
      ...(files ?? []).flatMap((file) => [file.name, file.text]),
      (reply?.pieces ?? []).map(([piece]) => piece).join(""),
    ]);
    return inLower(parts.join("\n"));
  } catch (error) {
    console.warn(error); // another program wrote it
    return "";
  }
}

// Replaces the title by a field. Enter or leaving it saves the new title; Escape does not.
function editTitle(name) {
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
  const close = (isSaved) => {
    field.onblur = null; // removing the field also triggers it
    const hadFocus = document.activeElement === field;
    const given = asTitle(field.value);
    field.remove();
    if (isSaved && given !== title) {
      chat.title = given || title; // shown before it is saved
      rename(name, given).catch(reportError);
    }
    listed = "";
    showChats();
    if (hadFocus) (find("rename", name) ?? document.querySelector("#chats [type=search]")).focus();
  };
  field.onblur = () => close(true);
  field.onkeydown = (event) => {
    const { key, isComposing } = event;
    if ((key !== "Enter" && key !== "Escape") || isComposing) return;
    event.preventDefault(); // or the key would press the button that gets the focus
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
  const isOwn = name === currentName();
  if (isOwn) clearCurrent();
  tabStorage?.removeItem(unsentKey(name));
  all = all.filter((chat) => chat.name !== name); // shown before it is deleted
  saving.then(() => store.remove(name)).catch(reportError);
  showChats();
  (find("remove", other) ?? document.querySelector("#chats [type=checkbox]"))?.focus();
  if (!isOwn) return;
  isDeleted = !isEmpty();
  document.querySelector("#new").click();
}

function reportError(error) {
  console.warn(error);
  showError(`The change could not be saved: ${store.reason(error)}.`);
}

document.addEventListener("click", ({ target }) => {
  const button = target.closest("#chats button");
  if (button?.dataset.open) openChat(button.dataset.open);
  if (button?.dataset.rename) editTitle(button.dataset.rename);
  if (button?.dataset.remove) deleteChat(button);
});
document.addEventListener("keydown", ({ key, target }) => {
  const row = key === "F2" && target.closest("#chats li");
  if (row) editTitle(row.querySelector("[data-open]")?.dataset.open);
});
document.addEventListener("input", ({ target }) => {
  if (!target.matches("#chats [type=search]")) return;
  tabStorage?.setItem("search", target.value); // opening a chat reloads the page
  showChats();
});

document.addEventListener("change", ({ target }) => {
  if (!target.matches("#chats [type=checkbox]")) return;
  const question = `Delete ${all.length === 1 ? "the saved chat" : `all ${all.length} saved chats`}?`;
  if (target.checked) store.setSaving(true).then(showChats);
  else if (all.length && !confirm(question)) target.checked = true;
  else stopSaving(all).catch(reportError);
});

function initList() {
  const search = document.querySelector("#chats [type=search]");
  if (!search) return;
  search.value = tabStorage?.getItem("search") ?? "";
  showChats();
}
document.addEventListener("chats", initList); // their place in the page exists now
document.addEventListener("chats-changed", readList); // in this tab or another
initList();
readList();
