// Saves the current chat in the store, and opens saved chats. chats.js shows their list.

const UNSAVED =
  tabStorage === null
    ? "The browser saves nothing for this page, so a reload loses this chat"
    : "This chat is too long for the browser to save, so a reload loses its end";

let isUndone = false; // the next message replaces the undone one
let isDeleted = false; // updates are ignored until the next chat starts
let isFirst = true; // the server returns the restored chat, maybe with other spaces and number formats
const asJson = (text) => JSON.stringify(JSON.parse(text));
let saving = Promise.resolve(); // settled when nothing is left to save

function saveChat(text) {
  const hasRoom = saveToTab(text);
  const before = lastSaved;
  lastSaved = text;
  if (!text) isDeleted = false;
  if (!text && isUndone) return;
  isUndone = false;
  const isSame = text === before || (isFirst && text && before && asJson(text) === asJson(before));
  isFirst = false;
  if (isSame || isDeleted) return; // nothing has changed
  if (!text || !store.savesChats()) {
    clearCurrent(); // the next message starts a new chat
    warn(hasRoom ? "" : UNSAVED);
    return;
  }
  if (currentName() === null) setCurrent({ name: store.newName(), versions: [] });
  const chat = current; // another one may be current when this is saved
  saving = saving.then(() => saveToStore(chat, text, before, hasRoom));
}

async function saveToStore(chat, text, before, hasRoom) {
  const version = store.newName();
  const versions = chat.versions;
  const isCurrent = () => chat === current && text === lastSaved;
  const note = (changes) => {
    Object.assign(chat, changes);
    if (chat === current) saveCurrent();
  };
  note({ versions: [...versions, version] });
  try {
    const { name, gone } = await store.save(chat, { title: titleOf(text), version, before }, text);
    if (name !== null) note({ name, versions: [version] });
    reportDeleted(gone);
    if (!isCurrent()) return;
    if (!hasRoom && name !== null) tabStorage?.removeItem("conversation");
    warn("");
  } catch (error) {
    console.warn(error);
    note({ versions });
    reportDeleted(error.gone ?? []);
    const why = `The browser cannot save this chat: ${store.reason(error)}`;
    if (isCurrent()) warn(`${why}. ${hasRoom ? "It lasts until you close this tab" : UNSAVED}`);
  }
}

// Shows why the chat is not saved.
function warn(why) {
  const notice = element.querySelector(".unsaved");
  notice.textContent = why && `${why}. Use Export to save it.`;
  notice.hidden = !why;
}
const isUnsaved = () => !element.querySelector(".unsaved").hidden;

const deletedTitles = []; // since the page was loaded, as the user may not have read the notice yet
function reportDeleted(gone) {
  if (!gone.length) return;
  deletedTitles.push(...gone.map(({ title }) => `“${title}”`));
  const [n, titles] = [deletedTitles.length, deletedTitles.join(", ")];
  const which = n === 1 ? `the oldest chat, ${titles}` : `the ${n} oldest chats: ${titles}`;
  showError(`To make room, the browser deleted ${which}.`);
}

// A chat's default title: its first message.
function titleOf(text) {
  const [{ user, files }] = JSON.parse(text);
  return asTitle(user || files?.[0]?.name || "");
}

function asTitle(text) {
  return [...text.slice(0, 1000).trim().replace(/\s+/g, " ")].slice(0, 80).join("");
}

// An empty title restores the default.
async function rename(name, title) {
  await store.rename(name, title || titleOf((await store.text(name)) ?? "[{}]"), title !== "");
}

const isEmpty = () => !element.querySelector(".turns > *");
let next = null; // the chat to open when the current reply has stopped
async function openChat(name) {
  if (name === currentName() && !isEmpty()) return;
  const stop = isBusy() && next === null && document.querySelector("#box .stop-button");
  next = name;
  if (stop) {
    stop.click();
    return;
  }
  let found;
  try {
    found = await store.read(name);
  } catch (error) {
    console.warn(error);
    alert(`This chat cannot be read: ${store.reason(error)}.`);
  }
  await saving;
  if (next !== name) return; // another one was clicked meanwhile
  next = null;
  const question = "The current chat is not saved. Opening another one discards it. Continue?";
  if (!found || (isUnsaved() && !isEmpty() && !confirm(question))) return;
  try {
    tabStorage.removeItem("conversation"); // to make room for unsent messages
    tabStorage.removeItem("tail");
    saveUnsent(currentName(), unsentHere());
    switchUnsent(name);
  } catch (error) {
    console.warn(error);
    saveToTab(lastSaved);
    alert("This tab has no space for that chat. Open it in another tab.");
    return;
  }
  // From here on the page saves nothing: the current chat is saved, and after the reload the server
  // gets the other one.
  document.documentElement.dataset.leaving = "";
  setCurrent({ name, versions: [found.chat.version] });
  if (!saveToTab(found.text)) tabStorage.removeItem("conversation");
  location.reload();
}

document.addEventListener("click", ({ target }) => {
  if (target.closest("[data-action=undo]")) isUndone = true;
  if (target.closest("#new")) {
    isUndone = false;
    if (tabStorage !== null) moveUnsentToNewChat();
    if (isEmpty()) clearCurrent();
  }
});

document.addEventListener("saved", ({ detail }) => {
  saveChat(detail);
  showChats(); // the current chat may have changed
  const isGenerating = detail && JSON.parse(detail).some(({ reply }) => reply && !reply.done && !reply.error);
  if (next !== null && !isGenerating) openChat(next); // else the reply has not stopped yet
});

// Deletes all saved chats. This tab still has its own.
async function stopSaving(list) {
  await store.setSaving(false);
  for (const { name } of list) tabStorage?.removeItem(unsentKey(name));
  clearCurrent();
  if (!saveToTab(lastSaved)) warn(UNSAVED);
}

restored.then(() => {
  if (readError) showError(`The chat cannot be read: ${store.reason(readError)}.`);
});
