// Text files become part of the message: chosen, dropped onto the page, or pasted.

const LARGEST = 2 ** 20; // bytes

async function textOf(file) {
  if (file.size > LARGEST) {
    throw new Error(`has ${(file.size / LARGEST).toFixed(1)} MB; 1 MB is the most that fits a message`);
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

// As a block of code, whose fence is longer than any in the text.
function quoted(name, text) {
  const fences = text.match(/`{3,}/g) ?? [];
  const fence = "`".repeat(1 + fences.reduce((most, { length }) => Math.max(most, length), 2));
  return `${name}:\n${fence}\n${text}\n${fence}\n\n`;
}

async function addFiles(files, into) {
  const refused = [];
  let added = "";
  for (const file of files) {
    try {
      added += quoted(file.name, await textOf(file));
    } catch (error) {
      // Of folders there is no more than the name.
      const gone = error instanceof DOMException ? "cannot be read; of a folder add the files" : "";
      refused.push(`${file.name} ${gone || error.message}`);
    }
  }
  if (added) append(added, into?.isConnected ? into : document.querySelector("#box textarea"));
  const notice = element.querySelector(".refused");
  notice.textContent = refused.join("\n");
  notice.hidden = !refused.length;
  if (refused.length) notice.scrollIntoView({ block: "nearest" });
}

// Not as if it were typed: Ctrl+Z would take it back, but execCommand takes 27 s for 100 kB.
function append(added, box) {
  const before = box.value && !box.value.endsWith("\n") ? `${box.value}\n\n` : box.value;
  box.value = before + added;
  box.dispatchEvent(new Event("input", { bubbles: true }));
  box.focus();
  box.setSelectionRange(box.value.length, box.value.length);
  box.scrollTop = box.scrollHeight;
}

// Where a message is written: in the box, or in a form that edits one.
const written = (event) => event.target.closest("#box textarea, .turn textarea");

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
  addFiles(event.dataTransfer.files, written(event));
});
document.addEventListener("paste", (event) => {
  const { files, types } = event.clipboardData;
  if (!files.length || !written(event)) return;
  // Cells and paragraphs are copied along with a picture of them.
  const isPicture = [...files].every(({ type }) => type.startsWith("image/"));
  if (isPicture && types.includes("text/plain")) return;
  event.preventDefault();
  addFiles(files, written(event));
});
