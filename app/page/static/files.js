// Text files go with a message: chosen, dropped onto the page, or pasted. They stand beside what is
// written, in the box or in a form that edits a turn, and never in it: areas are slow with long texts.

const LARGEST = 1e6; // bytes of all files of a message
const BLOCK = 400; // lines of a file that are laid out together
const WIDEST = /.{1,4000}/gsu; // characters of a line

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
        ? `has ${size}; a message takes 1 MB of files: add a part of it`
        : `has ${size}; of the 1 MB that a message takes, the other files leave ${left}: ` +
            "remove one, or add a part of it",
    );
  }
  const bytes = await file.arrayBuffer();
  const [first, second] = new Uint8Array(bytes);
  const encoding = first === 0xff && second === 0xfe ? "utf-16le" : "utf-8";
  try {
    const text = new TextDecoder(encoding, { fatal: true }).decode(bytes);
    if (!text.includes("\0")) return text.replaceAll("\r\n", "\n").trimEnd();
  } catch (error) {
    if (!(error instanceof TypeError)) throw error; // of what is no text
  }
  throw new Error("is no text in UTF-8; save it as plain text first");
}

// The place is #entry, or the form that edits a turn. Files lead where nothing is written yet.
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
      // Of folders there is no more than the name.
      const gone = error instanceof DOMException ? "cannot be read; of a folder add the files" : "";
      refused.push(`${file.name} ${gone || error.message}`);
    }
  }
  refuse(refused.join("\n"));
  if (!added.length) return;
  element.querySelector("[role=status].unseen").textContent = `Added ${added.join(", ")}`;
  into.focus();
}

function refuse(why) {
  const notice = element.querySelector(".refused");
  notice.textContent = why;
  notice.hidden = !why;
  if (why) notice.scrollIntoView({ block: "nearest" });
}

document.addEventListener("refused", ({ detail }) => refuse(detail));

function showFiles(place, files) {
  place.files = files;
  place.querySelector(".files").replaceChildren(...files.map(chip));
  if (place.id === "entry") keepFiles(files);
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

// What stands beside the box is kept for as long as the tab, as is what is typed into it.
function keepFiles(files) {
  try {
    if (files.length) ofTab?.setItem("files", JSON.stringify(files));
    else ofTab?.removeItem("files");
  } catch (error) {
    console.warn(error);
    ofTab.removeItem("files");
    refuse("The browser has no room to keep these files: a page that is loaded again lacks them.");
  }
}

// The box is made after the transcript.
function showKeptFiles() {
  const entry = document.querySelector("#entry");
  if (!entry?.querySelector(".files")) return;
  try {
    showFiles(entry, JSON.parse(ofTab?.getItem("files") ?? "[]"));
  } catch (error) {
    console.warn(error);
  }
}
document.addEventListener("files", showKeptFiles);
showKeptFiles();

document.addEventListener("click", ({ target }) => {
  const button = target.closest(".files button");
  if (!button) return;
  const place = button.closest("form, #entry");
  const buttons = [...place.querySelectorAll(".files button")];
  const at = buttons.indexOf(button);
  showFiles(place, filesOf(place).filter((_, i) => i !== at));
  refuse("");
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

// What was said in a turn, with its files, is in what the page keeps.
function turnOf(turn) {
  return known ? JSON.parse(known)[turn.dataset.index] : undefined;
}
const fileOf = (details) =>
  turnOf(details.closest("[data-index]"))?.files?.[details.dataset.file];

// Files of turns are put in where they are unfolded, in blocks that are laid out when they are seen.
function unfold(details) {
  const box = details.querySelector(".code");
  const file = fileOf(details);
  if (box.firstChild || !file) return;
  const pre = document.createElement("pre");
  const lines = file.text.split("\n").flatMap((line) => line.match(WIDEST) ?? [line]);
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
  true, // toggling does not bubble
);
document.addEventListener("kept", () => element.querySelectorAll(".file[open]").forEach(unfold));

// Where a message is written: in the box, or in a form that edits one.
const areaOf = (event) => event.target.closest("#box textarea, .turn textarea");

// What was refused is of no interest once the message goes on.
document.addEventListener("input", (event) => {
  if (event.isTrusted && event.target.matches("#box textarea")) {
    element.querySelector(".refused").hidden = true;
  }
});

document.querySelector("#add")?.setAttribute("title", "Add text files; or drop them here");
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
  event.preventDefault(); // or the browser would leave the page for the file
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
  // Cells and paragraphs are copied along with a picture of them.
  const isPicture = [...files].every(({ type }) => type.startsWith("image/"));
  if (isPicture && types.includes("text/plain")) return;
  event.preventDefault();
  addFiles(files, areaOf(event));
});
