// The cards of the start page, the shortcuts, and the start of it all.

import { $, $$, button, h, icon, makeGroup, memory, tried } from "./dom.js";
import { beginToListen, listeners } from "./api.js";
import {
  chooseMethod, closeDrawer, drawer, isOpen, readServer, server, startPresets, takeStatus,
  toggle, toggleSettings, useSettings, useTheme,
} from "./settings.js";
import { openModels, refreshModels, showModels } from "./models.js";
import { readChats, startChats } from "./chats.js";
import { followAddress, newChat, readChat, showTurns, startTranscript } from "./transcript.js";
import {
  bytesOf, compose, focusBox, restoreDraft, runningTurn, send, startComposer, stopReply,
} from "./composer.js";
import { startReplay } from "./replay.js";
import { openRace } from "./race.js";

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
    const about = [h("b", {}, title), h("span", {}, code ? `${line} (${name})` : line)];
    card.prepend(
      button(about, sendIt, { class: "card" }),
      button([icon("race"), "Race"], race, { class: "race-card", "aria-label": `Race: ${title}` }),
    );
  }
  makeGroup($("#start .cards"));
}

function startKeys() {
  document.addEventListener("keydown", (event) => {
    if ($("dialog[open]") || $(".menu")) return;
    const isWriting = event.target.matches("input:not([type=range]), textarea, select");
    const withCtrl = event.ctrlKey || event.metaKey;
    const key = event.key.length === 1 ? event.key.toLowerCase() : event.key;
    const pressed = `${withCtrl ? "Ctrl+" : ""}${withCtrl && event.shiftKey ? "Shift+" : ""}${key}`;
    const actions = {
      "Ctrl+k": () => {
        toggle($("#left"), true);
        $("#search").select();
      },
      "Ctrl+Shift+o": newChat,
      "Ctrl+b": () => toggle($("#left")),
      "Ctrl+.": toggleSettings,
      "?": isWriting ? null : () => $("#keys").showModal(),
      Escape: runningTurn() ? stopReply : isOpen(drawer()) ? closeDrawer : null,
    };
    const action = actions[pressed];
    if (!action || event.isComposing) return;
    event.preventDefault();
    action();
  });
}

listeners.status = (status) => {
  const before = server.status;
  takeStatus(status);
  if (status.loading?.model !== before.loading?.model || status.error !== before.error) refreshModels();
  showModels();
};
listeners.reset = tried(async () => {
  await readServer();
  await readChats();
  await readChat();
});

function startHeader() {
  $("#show-chats").onclick = () => toggle($("#left"));
  $("#show-settings").onclick = toggleSettings;
  $("#close-drawer").onclick = closeDrawer;
  $("#model").onclick = openModels;
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
  $(".skip").onclick = (event) => {
    event.preventDefault(); // the address is the chat's
    $("#box").focus();
  };
  startChats();
  startTranscript();
  startComposer();
  startHeader();
  startPresets();
  startReplay();
  startKeys();
  startCards();
  await readServer();
  const { method } = document.documentElement.dataset; // of --method
  useSettings({ ...memory.get("settings"), ...(method && { method }) });
  await readChats();
  window.addEventListener("hashchange", followAddress);
  showTurns();
  restoreDraft();
  await followAddress();
  beginToListen();
  focusBox();
  document.documentElement.dataset.ready = "";
}
document.addEventListener("part", start);
start();
