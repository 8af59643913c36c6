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
  const longest = Math.max(2, ...(text.match(/`{3,}/g) ?? []).map((fence) => fence.length));
  const fence = "`".repeat(longest + 1);
  return `${name}:\n${fence}\n${text}\n${fence}\n\n`;
}

async function addFiles(files) {
  const refused = [];
  let added = "";
  for (const file of files) {
    try {
      added += quoted(file.name, await textOf(file));
    } catch (error) {
      refused.push(`${file.name} ${error instanceof Error ? error.message : error}`);
    }
  }
  const notice = element.querySelector(".refused");
  notice.textContent = refused.join("\n");
  notice.hidden = !refused.length;
  if (refused.length) notice.scrollIntoView({ block: "nearest" });
  const box = document.querySelector("#box textarea");
  if (!box || !added) return;
  const before = box.value && !box.value.endsWith("\n") ? `${box.value}\n\n` : box.value;
  box.value = before + added;
  box.dispatchEvent(new Event("input", { bubbles: true }));
  box.focus();
  box.setSelectionRange(box.value.length, box.value.length);
  box.scrollTop = box.scrollHeight;
}

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
  addFiles(event.dataTransfer.files);
});
document.addEventListener("paste", (event) => {
  const { files } = event.clipboardData;
  if (!files.length || !event.target.closest("#box")) return;
  event.preventDefault();
  addFiles(files);
});
