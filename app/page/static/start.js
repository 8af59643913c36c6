// The cards of the start page, the shortcuts, and the start of it all.

import { $, $$, button, h, icon, makeGroup, memory, openDialog, tried } from "./dom.js";
import { beginToListen, listeners } from "./api.js";
import {
  chooseMethod, closeDrawer, dismissError, drawer, isOpen, readServer, server, startSettings, takeStatus,
  toggle, toggleSettings, useSettings, useTheme, usual,
} from "./settings.js";
import { findDraft, openModels, refreshModels, showModels, takeLoad } from "./models.js";
import { readChats, startChats } from "./chats.js";
import { followAddress, newChat, readAgain, showTurns, startTranscript } from "./transcript.js";
import { bytesOf, compose, focusBox, restoreDraft, runningTurn, send, startComposer, stopReply } from "./composer.js";
import { startReplay } from "./replay.js";
import { openRace } from "./race.js";
import { openTools } from "./tools.js";

// Each card of main.html has a message, maybe with a file. A click sends it, or has two methods race on it.
function startCards() {
  for (const card of $$("#start .cards li")) {
    const { title } = card.dataset;
    const [text, code] = $$("pre", card).map((part) => part.textContent);
    const { name } = card.lastElementChild.dataset;
    const sendIt = () => {
      compose(text, code ? [{ name, text: code, size: bytesOf(code), leads: true }] : []);
      send();
    };
    const prompt = code ? `${name}:\n\`\`\`\n${code}\n\`\`\`\n\n${text}` : text;
    const race = () => openRace({ prompt, start: true });
    const [line] = text.split("\n");
    const about = [h("b", title), h("span", code ? `${line} (${name})` : line)];
    card.prepend(
      button(about, sendIt, { class: "card" }),
      button([icon("race"), "Race"], race, { class: "race-card", "aria-label": `Race: ${title}` }),
    );
  }
  makeGroup($("#start .cards"));
}

// Each key, what it does, and its action if it has one everywhere.
const KEYS = [
  ["Enter", "send the message; while a reply is written: send it afterwards"],
  ["Shift+Enter", "a new line"],
  ["Esc", "stop the reply, close a menu or a drawer", () => (runningTurn() ? stopReply() : closeDrawer())],
  ["↑", "in an empty message box: edit the last message"],
  ["Ctrl+K", "search the chats", goToSearch],
  ["Ctrl+Shift+O", "new chat", () => newChat()],
  ["Ctrl+B", "show or hide the chats", () => toggle($("#left"))],
  ["Ctrl+.", "show or hide the settings", toggleSettings],
  ["↑ ↓", "in the list and the conversation: from one to the next"],
  ["F2, Delete", "on a chat in the list: rename or delete it"],
  ["?", "this list", showKeys],
];

function goToSearch() {
  toggle($("#left"), true);
  $("#search").select();
}

function showKeys() {
  const rows = KEYS.flatMap(([key, does]) => [h("dt", h("kbd", key)), h("dd", does)]);
  openDialog("Shortcuts", "", h("dl.keys", ...rows));
}

function startKeys() {
  document.addEventListener("keydown", (event) => {
    const { key, ctrlKey, metaKey, shiftKey, target } = event;
    if ($("dialog[open]") || $(".menu") || event.isComposing) return;
    const isWriting = target.matches("input:not([type=range]), textarea, select");
    const withCtrl = ctrlKey || metaKey;
    const name = key === "Escape" ? "Esc" : key.toUpperCase();
    const pressed = `${withCtrl ? "Ctrl+" : ""}${withCtrl && shiftKey ? "Shift+" : ""}${name}`;
    const [, , action] = KEYS.find(([one]) => one === pressed) ?? [];
    if (!action || (pressed === "?" && isWriting)) return;
    if (pressed === "Esc" && !runningTurn() && !isOpen(drawer())) return; // it empties the search
    event.preventDefault();
    action();
  });
}

listeners.status = (status) => {
  const before = server.status;
  takeStatus(status);
  if (status.loading?.model !== before.loading?.model || status.error !== before.error) refreshModels();
  takeLoad(before, status);
  showModels();
};
listeners.reset = tried(async () => {
  await readServer();
  await readChats();
  await readAgain();
});

function startHeader() {
  $("#show-chats").onclick = () => toggle($("#left"));
  $("#show-settings").onclick = toggleSettings;
  $("#close-drawer").onclick = closeDrawer;
  $("#help").onclick = showKeys;
  $("#tools").onclick = openTools;
  $("#model").onclick = () => openModels();
  $("#model-error button").onclick = dismissError;
  $("#method").onchange = ({ target }) => chooseMethod(target.value);
  for (const side of [$("#left"), drawer()]) toggle(side, isOpen(side)); // tells whether it is open
}

// Gradio makes the page's three parts; each tells when it is there.
let isStarting = false;
async function start() {
  if (isStarting || !$("#chats") || !$("#composer") || !$("#drawer-title") || !$("#right")) return;
  isStarting = true;
  useTheme(memory.get("theme"));
  $(".gradio-container").prepend($(".skip")); // the first stop of Tab
  $(".skip").onclick = (event) => (event.preventDefault(), $("#box").focus()); // the address is the chat's
  startChats();
  startTranscript();
  startComposer();
  startHeader();
  startSettings();
  startReplay();
  startKeys();
  startCards();
  await readServer();
  useSettings(usual());
  await readChats();
  window.addEventListener("hashchange", followAddress);
  showTurns();
  restoreDraft();
  await followAddress();
  beginToListen();
  setTimeout(findDraft, 2000); // it is no part of the first load
  focusBox();
  document.documentElement.dataset.ready = "";
}
document.addEventListener("part", start);
// Forms do what their handlers say. Those of dialogs close them, too.
document.addEventListener("submit", (event) => event.target.method === "dialog" || event.preventDefault());
start();
