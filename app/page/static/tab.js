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

// The tokens of a reply since the conversation was kept last: the server may end at any time.
function keepTail(text) {
  if ("leaving" in document.documentElement.dataset) return;
  try {
    if (text) ofTab?.setItem("tail", text);
    else ofTab?.removeItem("tail");
  } catch (error) {
    console.warn(error); // there is no room
  }
}

// The conversation with these tokens, where it lacks them.
function withTail(text) {
  try {
    const tail = JSON.parse(ofTab?.getItem("tail") ?? "null");
    if (!text || !tail) return text;
    const turns = JSON.parse(text);
    const turn = turns[tail.turn];
    const { start, reply } = tail;
    const { pieces, done } = turn.reply ?? turn.before ?? { pieces: [] };
    const isNewer = start <= pieces.length && pieces.length < start + reply.pieces.length;
    if (turn !== turns.at(-1) || (turn.reply && done) || !isNewer) return text;
    turn.reply = { ...reply, pieces: [...pieces.slice(0, start), ...reply.pieces] };
    return JSON.stringify(turns);
  } catch (error) {
    console.warn(error);
    return text;
  }
}

let known = ""; // what this tab kept or opened last
let unread = null; // why the conversation cannot be read
async function revive() {
  const kept = ofTab?.getItem("conversation") ?? null;
  known = kept ?? "";
  if (kept === null && own() !== null) {
    try {
      const found = await store.read(own());
      if (found) beOf({ name: own(), versions: [found.chat.version] });
      known = found?.text ?? "";
    } catch (error) {
      console.warn(error);
      unread = error;
      return known;
    }
  }
  const whole = withTail(known);
  if (whole !== known) keepInTab(whole);
  keepTail("");
  known = whole;
  return known;
}
const revived = revive();

// Whether the user has touched the settings: what the page itself fills in is not their choice.
let isChosen = false;
for (const type of ["input", "keydown", "pointerdown"]) {
  const note = ({ isTrusted, target }) => (isChosen ||= isTrusted && !!target.closest?.("#settings"));
  document.addEventListener(type, note, true);
}

// Values are in the order of `defaults`, an object of names and values.
function keepValues(defaults, values) {
  if ("leaving" in document.documentElement.dataset) return;
  const names = Object.keys(defaults);
  try {
    ofTab?.setItem("values", JSON.stringify(Object.fromEntries(names.map((name, i) => [name, values[i]]))));
    ofTab?.removeItem("typed");
  } catch (error) {
    console.warn(error); // there is no room
  }
  if (isChosen) rememberValues(defaults, values);
}

// For tabs opened later. Defaults are left out, as another version may have others.
function rememberValues(defaults, values) {
  const named = Object.entries(defaults).map(([name, value], i) => [name, value, values[i]]);
  const changed = named.filter(([name, before, value]) => name !== "box" && value !== before);
  try {
    store.keepFields(JSON.stringify(Object.fromEntries(changed.map(([name, , value]) => [name, value]))));
  } catch (error) {
    console.warn(error); // there is no room
  }
}

// This tab's own values, or those that were remembered. `typed` is the text in the box where no event
// of Gradio's brought it here: they wait while the server is away.
function keptValues() {
  try {
    const values = JSON.parse(ofTab?.getItem("values") ?? "null");
    const typed = ofTab?.getItem("typed") ?? null;
    if (values && typed !== null) values.box = typed;
    return JSON.stringify(values ? { tab: values } : { browser: JSON.parse(store.fields() ?? "{}") });
  } catch (error) {
    console.warn(error);
    return "{}";
  }
}

// Gradio's client says nothing of a call that the server found too large (guard.py).
const unwatchedFetch = window.fetch;
window.fetch = async (...request) => {
  const response = await unwatchedFetch(...request);
  if (response.status === 413) {
    const { error } = await response.clone().json();
    document.dispatchEvent(new CustomEvent("refused", { detail: error }));
  }
  return response;
};

// For the user to save.
function download(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}
