// What a tab has: the conversation in the window, and which of the chats it is. sessionStorage keeps
// both while the tab is open, as far as it has room (about 5 MB); a longer conversation is in the store
// alone. It stands in the page's head, for Gradio's first event to find the conversation.

// Where the browser is told to keep nothing, it throws when it is asked for.
let ofTab = null;
try {
  ofTab = sessionStorage;
} catch (error) {
  console.warn(error);
}

// Its name, once something of it was to be kept, and what this tab knows it as there: the version that
// was written or opened last, and one that may or may not have been written before the page was left.
let mine = { name: ofTab?.getItem("chat") ?? null, versions: [] };
try {
  mine.versions = JSON.parse(ofTab?.getItem("versions") ?? "[]");
} catch (error) {
  console.warn(error);
}
const own = () => mine.name;

function beOf(chat) {
  mine = chat;
  noteOwn();
}
const beOfNone = () => beOf({ name: null, versions: [] });

function noteOwn() {
  try {
    if (mine.name === null) ofTab?.removeItem("chat");
    else ofTab?.setItem("chat", mine.name);
    ofTab?.setItem("versions", JSON.stringify(mine.versions));
  } catch (error) {
    console.warn(error); // there is no room
  }
}

// Whether there is room for it. An earlier state stays until the store has this one.
function keepInTab(text) {
  try {
    ofTab?.setItem("conversation", text);
    return ofTab !== null;
  } catch (error) {
    console.warn(error);
    return false;
  }
}

let known = ""; // what this tab kept or opened last
let unread = null; // why the conversation cannot be read
async function revive() {
  const kept = ofTab?.getItem("conversation") ?? null;
  known = kept ?? "";
  if (kept !== null || own() === null) return known;
  try {
    const found = await store.read(own());
    if (found) beOf({ name: own(), versions: [found.chat.version] });
    known = found?.text ?? "";
  } catch (error) {
    console.warn(error);
    unread = error;
  }
  return known;
}
const revived = revive();

// For the user to save.
function download(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}
