// Text files attached to a message: selected, dropped onto the page, or pasted. They are listed beside
// the text, because textareas are slow with long texts.

const LARGEST = 1e6; // bytes, all files of a message together
const BLOCK = 400; // lines per block of a shown file
const LINE = /.{1,4000}/gsu; // longer lines are split

const bytesOf = (text) => new Blob([text]).size;
const filesOf = (place) => place.files ?? [];

function sizeOf(bytes) {
  if (bytes < 1000) return `${bytes} B`;
  return bytes < 999_500 ? `${(bytes / 1e3).toFixed()} kB` : `${(bytes / 1e6).toFixed(1)} MB`;
}

async function textOf(file, others) {
  const room = LARGEST - others;
  if (file.size > room) {
    const [size, left] = [file.size, room].map(sizeOf);
    throw new Error(
      room === LARGEST
        ? `is too large (${size}): a message can have 1 MB of files`
        : `is too large (${size}): a message can have 1 MB of files, and ${left} is left`,
    );
  }
  const bytes = await file.arrayBuffer();
  const [first, second] = new Uint8Array(bytes);
  const encoding = first === 0xff && second === 0xfe ? "utf-16le" : "utf-8";
  try {
    const text = new TextDecoder(encoding, { fatal: true }).decode(bytes);
    if (!text.includes("\0")) return text.replaceAll("\r\n", "\n").trimEnd();
  } catch (error) {
    if (!(error instanceof TypeError)) throw error; // a TypeError means invalid text
  }
  throw new Error("is not UTF-8 text; save it as plain text first");
}

// The place is #entry or a form that edits a turn. Files lead if there is no text yet.
async function addFiles(files, area) {
  const refused = [];
  const added = [];
  const into = area?.isConnected ? area : document.querySelector("#box textarea");
  const place = into.closest("form, #entry");
  const leads = !into.value.trim();
  for (const file of files) {
    try {
      const others = filesOf(place).reduce((sum, { text }) => sum + bytesOf(text), 0);
      const text = await textOf(file, others);
      showFiles(place, [...filesOf(place), { name: file.name, text, leads }]);
      added.push(file.name);
    } catch (error) {
      // A folder gives only its name.
      const isFolder = error instanceof DOMException;
      const why = isFolder ? "cannot be read; of a folder, add its files" : error.message;
      refused.push(`${file.name} ${why}`);
    }
  }
  showError(refused.join("\n"));
  if (!added.length) return;
  element.querySelector("[role=status].unseen").textContent = `Added ${added.join(", ")}`;
  into.focus();
}

function showError(why) {
  const notice = element.querySelector(".refused");
  notice.textContent = why;
  notice.hidden = !why;
  if (why) notice.scrollIntoView({ block: "nearest" });
}

document.addEventListener("refused", ({ detail }) => showError(detail));

function showFiles(place, files) {
  place.files = files;
  place.querySelector(".files").replaceChildren(...files.map(chip));
  if (place.id === "entry") saveFiles(files);
}

function chip({ name, text }) {
  const li = document.createElement("li");
  li.innerHTML = '<bdi></bdi><span></span><button type="button" title="Remove">×</button>';
  const [shown, size, remove] = li.children;
  shown.textContent = shown.title = name;
  size.textContent = sizeOf(bytesOf(text));
  remove.ariaLabel = `Remove ${name}`;
  return li;
}

// Files beside the box are saved for this tab, as is the text in it.
function saveFiles(files) {
  try {
    if (files.length) tabStorage?.setItem("files", JSON.stringify(files));
    else tabStorage?.removeItem("files");
  } catch (error) {
    console.warn(error);
    tabStorage.removeItem("files");
    showError("The browser has no space to save these files, so a reload loses them.");
  }
}

// Gradio creates the box after the transcript.
function showSavedFiles() {
  const entry = document.querySelector("#entry");
  if (!entry?.querySelector(".files")) return;
  try {
    showFiles(entry, JSON.parse(tabStorage?.getItem("files") ?? "[]"));
  } catch (error) {
    console.warn(error);
  }
}
document.addEventListener("files", showSavedFiles);
showSavedFiles();

document.addEventListener("click", ({ target }) => {
  const button = target.closest(".files button");
  if (!button) return;
  const place = button.closest("form, #entry");
  const buttons = [...place.querySelectorAll(".files button")];
  const at = buttons.indexOf(button);
  showFiles(place, filesOf(place).filter((_, i) => i !== at));
  showError("");
  const left = place.querySelectorAll(".files button");
  (left[at] ?? left[at - 1] ?? place.querySelector("textarea")).focus();
});

document.addEventListener("sent", ({ detail: names }) => {
  const entry = document.querySelector("#entry");
  const left = [...filesOf(entry)];
  for (const sent of names) {
    const at = left.findIndex(({ name }) => name === sent);
    if (at >= 0) left.splice(at, 1);
  }
  showFiles(entry, left);
});
document.addEventListener("put-back", ({ detail }) => {
  showFiles(document.querySelector("#entry"), detail);
});

// A turn's message and files.
function turnOf(turn) {
  return lastSaved ? JSON.parse(lastSaved)[turn.dataset.index] : undefined;
}
const fileOf = (details) =>
  turnOf(details.closest("[data-index]"))?.files?.[details.dataset.file];

// Inserts a file's text when it is opened, in blocks that the browser lays out when they are visible.
function unfold(details) {
  const box = details.querySelector(".code");
  const file = fileOf(details);
  if (box.firstChild || !file) return;
  const pre = document.createElement("pre");
  const lines = file.text.split("\n").flatMap((line) => line.match(LINE) ?? [line]);
  for (let i = 0; i < lines.length; i += BLOCK) {
    const block = document.createElement("div");
    block.textContent = lines.slice(i, i + BLOCK).join("\n");
    pre.append(block);
  }
  const copies = '<button type="button" data-action="copy-code">Copy</button>';
  box.innerHTML = `<span class="actions">${copies}</span>`;
  box.prepend(pre);
}
element.addEventListener(
  "toggle",
  ({ target }) => target.matches(".file[open]") && unfold(target),
  true, // toggle does not bubble
);
document.addEventListener("saved", () => element.querySelectorAll(".file[open]").forEach(unfold));

// The textarea of an event: the box, or a form that edits a turn.
const areaOf = (event) => event.target.closest("#box textarea, .turn textarea");

// Errors are hidden when the user types on.
document.addEventListener("input", (event) => {
  if (event.isTrusted && event.target.matches("#box textarea")) {
    element.querySelector(".refused").hidden = true;
  }
});

document.querySelector("#add")?.setAttribute("title", "Add text files, or drop them here");
document.addEventListener("click", (event) => {
  if (!event.target.closest("#add")) return;
  const input = document.createElement("input");
  input.type = "file";
  input.multiple = true;
  input.onchange = () => addFiles(input.files);
  input.click();
});

const hasFiles = (event) => event.dataTransfer?.types.includes("Files") ?? false;
const mark = (on) => document.querySelector("#entry")?.classList.toggle("dropping", on);
document.addEventListener("dragover", (event) => {
  if (!hasFiles(event)) return;
  event.preventDefault(); // or the browser opens the file instead of the page
  mark(true);
});
document.addEventListener("dragleave", (event) => {
  if (!event.relatedTarget) mark(false);
});
document.addEventListener("drop", (event) => {
  if (!hasFiles(event)) return;
  event.preventDefault();
  mark(false);
  addFiles(event.dataTransfer.files, areaOf(event));
});
document.addEventListener("paste", (event) => {
  const { files, types } = event.clipboardData;
  if (!files.length || !areaOf(event)) return;
  // Spreadsheets and word processors also copy a picture of the text.
  const isPicture = [...files].every(({ type }) => type.startsWith("image/"));
  if (isPicture && types.includes("text/plain")) return;
  event.preventDefault();
  addFiles(files, areaOf(event));
});
