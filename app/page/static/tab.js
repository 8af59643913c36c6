// The state of one browser tab: its chat and its settings. sessionStorage has both while the tab is open.
// A chat that does not fit (about 5 MB) is in the store alone. Loaded in the page's head, so that
// Gradio's first event finds the chat.

// Throws if the browser is set to store nothing.
let tabStorage = null;
try {
  tabStorage = sessionStorage;
} catch (error) {
  console.warn(error);
}

// The chat's name in the store, null before it is saved, and the versions that count as this tab's: the
// one last saved or opened, and one whose saving the end of the page may have interrupted.
let current = { name: tabStorage?.getItem("chat") ?? null, versions: [] };
try {
  current.versions = JSON.parse(tabStorage?.getItem("versions") ?? "[]");
} catch (error) {
  console.warn(error);
}
const currentName = () => current.name;

function setCurrent(chat) {
  current = chat;
  saveCurrent();
}
const clearCurrent = () => setCurrent({ name: null, versions: [] });

function saveCurrent() {
  try {
    if (current.name === null) tabStorage?.removeItem("chat");
    else tabStorage?.setItem("chat", current.name);
    tabStorage?.setItem("versions", JSON.stringify(current.versions));
  } catch (error) {
    console.warn(error); // the storage is full
  }
}

// Returns whether it fits. If not, the earlier state stays until the store has this one.
function saveToTab(text) {
  try {
    tabStorage?.setItem("conversation", text);
    return tabStorage !== null;
  } catch (error) {
    console.warn(error);
    return false;
  }
}

// The reply's tokens since the last full save, because the server may die at any time.
function saveTail(text) {
  if ("leaving" in document.documentElement.dataset) return;
  try {
    if (text) tabStorage?.setItem("tail", text);
    else tabStorage?.removeItem("tail");
  } catch (error) {
    console.warn(error); // the storage is full
  }
}

// The chat as JSON, completed with those tokens.
function mergeTail(text) {
  try {
    const tail = JSON.parse(tabStorage?.getItem("tail") ?? "null");
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

let lastSaved = ""; // the chat as JSON, as this tab last saved or opened it
let readError = null; // why the chat cannot be read
async function restore() {
  const inTab = tabStorage?.getItem("conversation") ?? null;
  lastSaved = inTab ?? "";
  if (inTab === null && currentName() !== null) {
    try {
      const found = await store.read(currentName());
      if (found) setCurrent({ name: currentName(), versions: [found.chat.version] });
      lastSaved = found?.text ?? "";
    } catch (error) {
      console.warn(error);
      readError = error;
      return lastSaved;
    }
  }
  const whole = mergeTail(lastSaved);
  if (whole !== lastSaved) saveToTab(whole);
  saveTail("");
  lastSaved = whole;
  return lastSaved;
}
const restored = restore();

// Whether the user has touched the settings. Values that the page fills in are not remembered.
let isTouched = false;
for (const type of ["input", "keydown", "pointerdown"]) {
  const note = ({ isTrusted, target }) => (isTouched ||= isTrusted && !!target.closest?.("#settings"));
  document.addEventListener(type, note, true);
}

// `defaults` maps the fields' names to their default values; `values` are in the same order.
function saveValues(defaults, values) {
  if ("leaving" in document.documentElement.dataset) return;
  const names = Object.keys(defaults);
  try {
    tabStorage?.setItem("values", JSON.stringify(Object.fromEntries(names.map((name, i) => [name, values[i]]))));
    tabStorage?.removeItem("typed");
  } catch (error) {
    console.warn(error); // the storage is full
  }
  if (isTouched) rememberValues(defaults, values);
}

// For tabs opened later. Leaves out defaults, because they may differ in another version.
function rememberValues(defaults, values) {
  const named = Object.entries(defaults).map(([name, value], i) => [name, value, values[i]]);
  const changed = named.filter(([name, before, value]) => name !== "box" && value !== before);
  try {
    store.saveFields(JSON.stringify(Object.fromEntries(changed.map(([name, , value]) => [name, value]))));
  } catch (error) {
    console.warn(error); // the storage is full
  }
}

// This tab's values, or else the remembered ones. `typed` is the text in the box if no Gradio event has
// saved it: they do not arrive while the server is down.
function savedValues() {
  try {
    const values = JSON.parse(tabStorage?.getItem("values") ?? "null");
    const typed = tabStorage?.getItem("typed") ?? null;
    if (values && typed !== null) values.box = typed;
    return JSON.stringify(values ? { tab: values } : { browser: JSON.parse(store.fields() ?? "{}") });
  } catch (error) {
    console.warn(error);
    return "{}";
  }
}

// Gradio's client does not report that the server refused a call as too large (guard.py).
const originalFetch = window.fetch;
window.fetch = async (...request) => {
  const response = await originalFetch(...request);
  if (response.status === 413) {
    const { error } = await response.clone().json();
    document.dispatchEvent(new CustomEvent("refused", { detail: error }));
  }
  return response;
};

// Offers a file for download.
function download(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}
