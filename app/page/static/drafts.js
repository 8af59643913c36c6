// What was written and not sent: in the box, beside it, and in forms that edit a turn. The tab keeps it
// while the page is loaded again, and while another chat is open, under the name of its own; a chat
// that has not begun has none.

const draftKey = (name) => `draft:${name ?? ""}`;
let edits = ofTab === null ? [] : readJson("edits", []); // forms to be opened with their turns

function readJson(key, otherwise) {
  try {
    return JSON.parse(ofTab.getItem(key)) ?? otherwise;
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

// Once the turns are there, which come all at once.
function reopenEdits() {
  for (const { index, text, files } of edits) {
    const turn = element.querySelector(`[data-index="${index}"]`);
    if (turn && !turn.querySelector(".live, form")) edit(turn, { text, files });
  }
  edits = [];
}

// Raises where the tab has no room.
function keepDraft(name, draft) {
  const isEmpty = !draft.typed && !draft.files.length && !draft.edits.length;
  if (isEmpty) ofTab.removeItem(draftKey(name));
  else ofTab.setItem(draftKey(name), JSON.stringify(draft));
}

function written() {
  const entry = document.querySelector("#entry");
  return { typed: entry.querySelector("textarea").value, files: filesOf(entry), edits: openEdits() };
}

function takeDraft(name) {
  const draft = readJson(draftKey(name), {});
  ofTab.removeItem(draftKey(name));
  return { typed: "", files: [], edits: [], ...draft };
}

// For the page to find when it is loaded again.
function exchangeDrafts(name) {
  const { typed, files, edits } = takeDraft(name);
  ofTab.setItem("typed", typed);
  ofTab.setItem("files", JSON.stringify(files));
  ofTab.setItem("edits", JSON.stringify(edits));
}

// What is in the box goes along to a new chat; else it gets what was written in one before.
function beginDraft() {
  const { typed, files, edits: open } = written();
  edits = [];
  if (own() !== null) keepDraft(own(), { typed: "", files: [], edits: open });
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
    if (ofTab === null || "leaving" in document.documentElement.dataset) return;
    try {
      ofTab.setItem("edits", JSON.stringify([...edits, ...openEdits()]));
    } catch (error) {
      console.warn(error); // there is no room
    }
  });
}
