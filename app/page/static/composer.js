// The message box: text, attached files, Send and Stop, and drafts of unsent messages.

import { $, button, chooseFiles, h, iconButton, inSize, memory, setText, tried } from "./dom.js";
import { api } from "./api.js";
import { settings } from "./settings.js";
import { chat, editTurn, isIncognito, setChat, turns } from "./transcript.js";

let attached = []; // { name, text } of text files, { name, pdf } in base64
let isQueued = false; // whether the message goes as soon as the reply ends
let isSending = false; // until the server has taken a message

const box = () => $("#box");
export const runningTurn = () => turns.find((turn) => turn.state === "running");

// Not on touch screens, where focus opens the keyboard.
export function focusBox() {
  if (matchMedia("(hover: hover)").matches) box().focus();
}

export function showComposer() {
  const isRunning = !!runningTurn();
  $("#send").hidden = isRunning;
  $("#stop").hidden = !isRunning;
  if (isQueued && !isRunning && !isSending) send();
  const queued = isQueued ? "Sent when this reply ends. " : "";
  $("#queued").replaceChildren(queued, ...(queued ? [button("Keep it here", unqueue)] : []));
}

function unqueue() {
  isQueued = false;
  showComposer();
  box().focus();
}

export async function send() {
  const text = box().value.replace(/^\n+|\n+$/g, "");
  const files = attached;
  if (!text.trim() && !files.length) return unqueue();
  if (runningTurn() || isSending) {
    isQueued = true;
    return showComposer();
  }
  isQueued = false;
  isSending = true;
  setText($("#refused"), "");
  compose("", []);
  try {
    if (!chat) {
      setChat(await api("POST", "/chats", { settings, incognito: isIncognito }));
      history.pushState(null, "", `#chat=${chat.id}`);
    }
    const parent = turns.at(-1)?.id ?? null;
    const path = `/chats/${chat.id}/messages`;
    const { turns: added } = await api("POST", path, { text, files, parent, settings }); // the stream shows it
    isSending = false;
    if (turns.some(({ id }) => id === added.at(-1).id)) showComposer(); // it may have ended already
  } catch (error) {
    console.warn(error);
    if (!box().value && !attached.length) compose(text, files);
    setText($("#refused"), error.message);
    isQueued = false;
  } finally {
    isSending = false;
  }
}

export const stopReply = tried(async () => {
  const turn = runningTurn();
  if (turn) await api("POST", `/turns/${turn.id}/stop`);
});

// Fills the box.
export function compose(text, files = attached) {
  box().value = text;
  fitBox();
  attached = files;
  const chips = files.map(({ name, size }, i) => {
    const remove = () => {
      compose(box().value, attached.toSpliced(i, 1));
      box().focus();
    };
    const cross = iconButton("close", `Remove ${name}`, remove);
    return h("li", h("bdi", { title: name }, name), h("span", inSize(size)), cross);
  });
  $("#files").replaceChildren(...chips);
  keepDraft();
}

function fitBox() {
  if (CSS.supports("field-sizing: content")) return; // else a layout for each key
  const area = box();
  area.style.height = "auto";
  area.style.height = `${Math.min(area.scrollHeight, innerHeight * 0.4)}px`;
}

// Drafts: what was typed stays with its chat, through reloads; that of incognito chats in memory alone.

let fleeting = {}; // drafts of incognito chats
const isFleeting = () => chat?.incognito ?? isIncognito;
const drafts = () => (isFleeting() ? fleeting : (memory.get("drafts") ?? {}));
const keepDrafts = (now) => (isFleeting() ? (fleeting = now) : memory.set("drafts", now));

export function keepDraft() {
  const { [chat?.id ?? "new"]: _, ...others } = drafts();
  const draft = { text: box().value, files: JSON.stringify(attached).length < 5e5 ? attached : [] };
  keepDrafts(draft.text || draft.files.length ? { ...others, [chat?.id ?? "new"]: draft } : others);
}

export function restoreDraft() {
  const { text = "", files = [] } = drafts()[chat?.id ?? "new"] ?? {};
  isQueued = false;
  compose(text, files);
}

// Files

const LONGEST_PASTE = 8e3; // bytes; a longer one is a file
const LARGEST = 1e6; // bytes of text, all files of a message together
const LARGEST_PDF = 20e6;
const PICTURE = /\.(png|jpe?g|gif|webp|bmp|svg|heic|tiff?)$/i;
export const bytesOf = (text) => new Blob([text]).size;

async function readFile(file) {
  const { name, size, type } = file;
  if (type.startsWith("image/") && type !== "image/svg+xml" && PICTURE.test(name)) {
    throw new Error("is a picture. Models here read text only. Paste the text in it instead.");
  }
  if (type === "application/pdf" || /\.pdf$/i.test(name)) {
    if (size > LARGEST_PDF) throw new Error(`is too large (${inSize(size)}): a PDF can have 20 MB.`);
    const bytes = new Uint8Array(await file.arrayBuffer());
    let text = "";
    for (const byte of bytes) text += String.fromCharCode(byte);
    return { name, size, pdf: btoa(text) };
  }
  const room = LARGEST - attached.reduce((sum, one) => sum + bytesOf(one.text ?? ""), 0);
  if (size > room) {
    const left = room < LARGEST ? `, and ${inSize(room)} is left` : "";
    throw new Error(`is too large (${inSize(size)}): a message can have 1 MB of files${left}.`);
  }
  const bytes = await file.arrayBuffer();
  const [first, second] = new Uint8Array(bytes);
  const encoding = first === 0xff && second === 0xfe ? "utf-16le" : "utf-8";
  try {
    const text = new TextDecoder(encoding, { fatal: true }).decode(bytes);
    if (!text.includes("\0")) return { name, size, text: text.replaceAll("\r\n", "\n").trimEnd() };
  } catch (error) {
    if (!(error instanceof TypeError)) throw error; // a TypeError means invalid text
  }
  throw new Error("is not text or PDF. Save it as plain text first.");
}

// Files lead if there is no text yet.
export async function addFiles(files) {
  const refused = [];
  const leads = !box().value.trim();
  for (const file of files) {
    try {
      const read = await readFile(file);
      compose(box().value, [...attached, { ...read, leads }]);
    } catch (error) {
      // A folder gives only its name.
      const why =
        error instanceof DOMException ? "cannot be read. If it is a folder, select its files instead." : error.message;
      refused.push(`${file.name} ${why}`);
    }
  }
  setText($("#refused"), refused.join("\n"));
  box().focus();
}

export function startComposer() {
  const form = $("#composer");
  form.onsubmit = send;
  $("#stop").onclick = () => (stopReply(), box().focus());
  let typing = 0;
  window.addEventListener("pagehide", keepDraft);
  box().oninput = () => {
    fitBox();
    clearTimeout(typing); // all drafts and their files are written, which takes long
    typing = setTimeout(keepDraft, 300);
    setText($("#refused"), "");
    if (isQueued) unqueue();
  };
  box().onkeydown = (event) => {
    const { key, shiftKey, isComposing } = event;
    if (key === "Enter" && !shiftKey && !isComposing) {
      event.preventDefault();
      send();
    } else if (key === "ArrowUp" && !box().value) {
      const last = turns.findLast(({ role }) => role === "user");
      if (!last || runningTurn()) return;
      event.preventDefault();
      editTurn(last);
    }
  };
  $("#attach").onclick = () => chooseFiles({ multiple: true }, addFiles);
  const hasFiles = ({ dataTransfer }) => dataTransfer?.types.includes("Files");
  const mark = (on) => form.classList.toggle("dropping", on);
  document.addEventListener("dragover", (event) => {
    if (!hasFiles(event)) return;
    event.preventDefault(); // or the browser opens the file instead of the page
    mark(true);
  });
  document.addEventListener("dragleave", (event) => event.relatedTarget || mark(false));
  document.addEventListener("drop", (event) => {
    if (!hasFiles(event)) return;
    event.preventDefault();
    mark(false);
    addFiles(event.dataTransfer.files);
  });
  box().onpaste = (event) => {
    const { files } = event.clipboardData;
    // Spreadsheets and word processors also copy a picture of the text.
    const text = event.clipboardData.getData("text/plain");
    if (text ? bytesOf(text) <= LONGEST_PASTE : !files.length) return;
    event.preventDefault();
    addFiles(text ? [new File([text], `pasted-${attached.length + 1}.txt`)] : files);
  };
}
