// Drafts: unsent text and files in the box and in forms that edit a turn. The tab saves them across
// reloads, and by chat name while another chat is open. A new chat has no name yet.

const draftKey = (name) => `draft:${name ?? ""}`;
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
function saveDraft(name, draft) {
  const isEmpty = !draft.typed && !draft.files.length && !draft.edits.length;
  if (isEmpty) tabStorage.removeItem(draftKey(name));
  else tabStorage.setItem(draftKey(name), JSON.stringify(draft));
}

function currentDraft() {
  const entry = document.querySelector("#entry");
  return { typed: entry.querySelector("textarea").value, files: filesOf(entry), edits: openEdits() };
}

function takeDraft(name) {
  const draft = readJson(draftKey(name), {});
  tabStorage.removeItem(draftKey(name));
  return { typed: "", files: [], edits: [], ...draft };
}

// Puts a chat's draft where the page looks for it after the reload.
function switchDrafts(name) {
  const { typed, files, edits } = takeDraft(name);
  tabStorage.setItem("typed", typed);
  tabStorage.setItem("files", JSON.stringify(files));
  tabStorage.setItem("edits", JSON.stringify(edits));
}

// A new chat takes over what is in the box, or else gets the draft of an earlier new chat.
function draftForNewChat() {
  const { typed, files, edits: open } = currentDraft();
  edits = [];
  if (currentName() !== null) saveDraft(currentName(), { typed: "", files: [], edits: open });
  if (typed || files.length) return;
  const draft = takeDraft(null);
  const box = document.querySelector("#box textarea");
  showFiles(box.closest("#entry"), draft.files);
  if (!draft.typed) return;
  box.value = draft.typed;
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
