// Unsent text and files, in the box and in forms that edit a turn. The tab saves them across reloads,
// and by chat name while another chat is open. A new chat has no name yet.

const unsentKey = (name) => `draft:${name ?? ""}`;
let edits = tabStorage === null ? [] : readJson("edits", []); // forms to reopen when their turns are shown

function readJson(key, otherwise) {
  try {
    return JSON.parse(tabStorage.getItem(key)) ?? otherwise;
  } catch (error) {
    console.warn(error);
    return otherwise;
  }
}

function openEdits() {
  const forms = [...element.querySelectorAll(".turns form")];
  return forms.map((form) => ({
    index: Number(form.closest("[data-index]").dataset.index),
    text: form.querySelector("textarea").value,
    files: filesOf(form),
  }));
}

// Called once the turns are shown; they all come at once.
function reopenEdits() {
  for (const { index, text, files } of edits) {
    const turn = element.querySelector(`[data-index="${index}"]`);
    if (turn && !turn.querySelector(".live, form")) edit(turn, { text, files });
  }
  edits = [];
}

// Throws if the tab's storage is full.
function saveUnsent(name, unsent) {
  const isEmpty = !unsent.typed && !unsent.files.length && !unsent.edits.length;
  if (isEmpty) tabStorage.removeItem(unsentKey(name));
  else tabStorage.setItem(unsentKey(name), JSON.stringify(unsent));
}

function unsentHere() {
  const entry = document.querySelector("#entry");
  return { typed: entry.querySelector("textarea").value, files: filesOf(entry), edits: openEdits() };
}

function takeUnsent(name) {
  const unsent = readJson(unsentKey(name), {});
  tabStorage.removeItem(unsentKey(name));
  return { typed: "", files: [], edits: [], ...unsent };
}

// Puts a chat's unsent message where the page looks for it after the reload.
function switchUnsent(name) {
  const { typed, files, edits } = takeUnsent(name);
  tabStorage.setItem("typed", typed);
  tabStorage.setItem("files", JSON.stringify(files));
  tabStorage.setItem("edits", JSON.stringify(edits));
}

// A new chat takes over what is in the box, or else what an earlier new chat left unsent.
function moveUnsentToNewChat() {
  const { typed, files, edits: open } = unsentHere();
  edits = [];
  if (currentName() !== null) saveUnsent(currentName(), { typed: "", files: [], edits: open });
  if (typed || files.length) return;
  const unsent = takeUnsent(null);
  const box = document.querySelector("#box textarea");
  showFiles(box.closest("#entry"), unsent.files);
  if (!unsent.typed) return;
  box.value = unsent.typed;
  box.dispatchEvent(new Event("input", { bubbles: true }));
}

for (const event of ["pagehide", "visibilitychange"]) {
  window.addEventListener(event, () => {
    if (tabStorage === null || "leaving" in document.documentElement.dataset) return;
    try {
      tabStorage.setItem("edits", JSON.stringify([...edits, ...openEdits()]));
    } catch (error) {
      console.warn(error); // the storage is full
    }
  });
}
