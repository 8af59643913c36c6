// The conversation becomes a chat of the store's, and a chat of the store's the conversation. chats.js
// shows the list of them.

const ENDS =
  ofTab === null
    ? "The browser keeps nothing of this page: if it is loaded again, this conversation is gone"
    : "This conversation is too long for the browser to keep: if the page is loaded again, its end is gone";

let isUndone = false; // what is said next takes the place of what was undone
let isDeleted = false; // what comes before the next chat begins is unwanted
let isFirst = true; // what was revived comes back, maybe with other spaces and zeros than in a file
const asJson = (text) => JSON.stringify(JSON.parse(text));
let keeping = Promise.resolve(); // until what was to be kept is

function keepChat(text) {
  const hasRoom = keepInTab(text);
  const before = known;
  known = text;
  if (!text) isDeleted = false;
  if (!text && isUndone) return;
  isUndone = false;
  const isSame = text === before || (isFirst && text && before && asJson(text) === asJson(before));
  isFirst = false;
  if (isSame || isDeleted) return; // it was only loaded again
  if (!text || !store.areKept()) {
    beOfNone(); // what is said next begins another
    warn(hasRoom ? "" : ENDS);
    return;
  }
  if (own() === null) beOf({ name: store.newName(), versions: [] });
  const chat = mine; // which may be another's turn when this one's comes
  keeping = keeping.then(() => keepIn(chat, text, before, hasRoom));
}

async function keepIn(chat, text, before, hasRoom) {
  const version = store.newName();
  const versions = chat.versions;
  const isCurrent = () => chat === mine && text === known;
  const note = (changes) => {
    Object.assign(chat, changes);
    if (chat === mine) noteOwn();
  };
  note({ versions: [...versions, version] });
  try {
    const { name, gone } = await store.keep(chat, { title: titleOf(text), version, before }, text);
    if (name !== null) note({ name, versions: [version] });
    announceGone(gone);
    if (!isCurrent()) return;
    if (!hasRoom && name !== null) ofTab?.removeItem("conversation");
    warn("");
  } catch (error) {
    console.warn(error);
    note({ versions });
    announceGone(error.gone ?? []);
    const why = `The browser does not keep this conversation: ${store.reason(error)}`;
    if (isCurrent()) warn(`${why}. ${hasRoom ? "It lasts as long as this tab" : ENDS}`);
  }
}

// What there is of it is in this tab alone, or not even there.
function warn(why) {
  const notice = element.querySelector(".unkept");
  notice.textContent = why && `${why}. Export saves it.`;
  notice.hidden = !why;
}
const isUnkept = () => !element.querySelector(".unkept").hidden;

const forgotten = []; // since the page was loaded: the second may go before the first was read
function announceGone(gone) {
  if (!gone.length) return;
  forgotten.push(...gone.map(({ title }) => `“${title}”`));
  const [n, titles] = [forgotten.length, forgotten.join(", ")];
  const which = n === 1 ? `the oldest chat, ${titles}` : `the ${n} oldest chats: ${titles}`;
  refuse(`There was no more room; the browser forgot ${which}.`);
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
async function rename(name, title) {
  await store.rename(name, title || titleOf((await store.text(name)) ?? "[{}]"), title !== "");
}

const isEmpty = () => !element.querySelector(".turns > *");
let next = null; // to be opened when the reply that comes has stopped
async function openChat(name) {
  if (name === own() && !isEmpty()) return;
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
    alert(`That chat cannot be read: ${store.reason(error)}.`);
  }
  await keeping;
  if (next !== name) return; // another was clicked meanwhile
  next = null;
  const goes = "The conversation in the window is not kept; opening another chat discards it.";
  if (!found || (isUnkept() && !isEmpty() && !confirm(goes))) return;
  try {
    ofTab.removeItem("conversation"); // for the drafts to have its room
    ofTab.removeItem("tail");
    keepDraft(own(), written());
    exchangeDrafts(name);
  } catch (error) {
    console.warn(error);
    keepInTab(known);
    alert("This tab has no room for that chat; open it in another.");
    return;
  }
  // What the page would still keep of the present one is there already, and the server reads the
  // other when the page is loaded.
  document.documentElement.dataset.leaving = "";
  beOf({ name, versions: [found.chat.version] });
  if (!keepInTab(found.text)) ofTab.removeItem("conversation");
  location.reload();
}

document.addEventListener("click", ({ target }) => {
  if (target.closest("[data-action=undo]")) isUndone = true;
  if (target.closest("#new")) {
    isUndone = false;
    if (ofTab !== null) beginDraft();
    if (isEmpty()) beOfNone();
  }
});

document.addEventListener("kept", ({ detail }) => {
  keepChat(detail);
  showChats(); // which of them is in the window may have changed
  const isMaking = detail && JSON.parse(detail).some(({ reply }) => reply && !reply.done && !reply.error);
  if (next !== null && !isMaking) openChat(next); // else Stop has not come through yet
});

// What was kept is forgotten, but for what this tab shows.
async function forgetAll(list) {
  await store.switchTo(false);
  for (const { name } of list) ofTab?.removeItem(draftKey(name));
  beOfNone();
  if (!keepInTab(known)) warn(ENDS);
}

revived.then(() => {
  if (unread) refuse(`The conversation cannot be read: ${store.reason(unread)}.`);
});
