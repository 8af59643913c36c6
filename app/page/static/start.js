// The start page, the shortcuts, and the start of it all.

const NOTES = `Meeting notes, 12 March
- Anna sends the new price list to all customers by Friday.
- Ben books the room in Hamburg for the workshop on 4 April.
- Clara asks the printer for a second offer for 500 flyers.`;
const CODE = `def total(orders):
    net = 0
    for order in orders:
        net = net + order["price"] * order["amount"]
    return round(net * 1.19, 2)`;

// Drafts are copied from the text so far, so they pay where a reply repeats it.
const PROMPTS = [
  ["Change one line of code", `Change the tax in this code from 19 to 21 percent. Write the whole code again.\n\n${CODE}`],
  ["Tidy up notes", `Write these notes again, unchanged, with a number before each line.\n\n${NOTES}`],
  ["Turn a list into JSON", `Write this list as JSON, with the keys "city" and "country".\n\nParis, France\nRome, Italy\nVienna, Austria\nMadrid, Spain\nLisbon, Portugal`],
  ["Repeat a text", `Repeat this text three times:\n\nThe quick brown fox jumps over the lazy dog. The dog sleeps on.`],
  ["Invent a story", "Write a short story about a lighthouse keeper who finds a door in the sea.", "Little to copy: drafts rarely pay here"],
];

function showStart() {
  const model = server.status?.model;
  const size = model ? `${model.name}: ${model.description}` : "No model is loaded yet";
  const cards = PROMPTS.map(([title, prompt, why]) => {
    const use = () => {
      setBox(prompt);
      send();
    };
    return h(
      "li",
      {},
      h("button", { type: "button", class: "card", onclick: use }, h("b", {}, title), h("span", {}, why ?? prompt.split("\n")[0])),
      h("button", { type: "button", class: "race-card", onclick: () => openRace({ prompt, start: true }), "aria-label": `Race: ${title}` }, icon("race"), "Race"),
    );
  });
  $("#start").replaceChildren(
    h("h2", {}, "See speculative decoding at work"),
    h(
      "p",
      {},
      "A method drafts several tokens ahead, and the model checks them in one step. ",
      h("span", { class: "drafted" }, "Underlined text"),
      " was drafted and accepted: it saved steps, and the text is the same.",
    ),
    h("p", { class: "quiet" }, `${size}. ${expectationOf(model)}`),
    h("ul", { class: "cards" }, ...cards),
  );
}

// What to expect of a model of this size. The demo model that is included only shows the methods.
function expectationOf(model) {
  const [, number, unit] = model?.description.match(/([\d.]+)([MB])\b/) ?? [];
  const millions = number * (unit === "B" ? 1000 : 1);
  if (millions < 100) return "It is a small demo model, and its answers are not reliable.";
  return millions < 2000 ? "It is a small model: good for short and simple texts, and often wrong." : "";
}

const KEYS = [
  ["Enter", "send the message; while a reply is written: send it afterwards"],
  ["Shift+Enter", "a new line"],
  ["Esc", "stop the reply, close a menu or a drawer"],
  ["↑", "in an empty message box: edit the last message"],
  ["Ctrl+K", "search the chats"],
  ["Ctrl+Shift+O", "new chat"],
  ["Ctrl+B", "show or hide the chats"],
  ["Ctrl+.", "show or hide the settings"],
  ["↑ ↓", "in the list and the conversation: from one to the next"],
  ["F2, Delete", "on a chat in the list: rename or delete it"],
  ["?", "this list"],
];

function showKeys() {
  const rows = KEYS.flatMap(([keys, what]) => [h("dt", {}, h("kbd", {}, keys)), h("dd", {}, what)]);
  openDialog("Shortcuts", h("dl", { class: "keys" }, ...rows));
}

function startKeys() {
  document.addEventListener("keydown", (event) => {
    if ($("dialog[open]") || $(".menu")) return;
    const isWriting = event.target.matches("input:not([type=range]), textarea, select");
    const withCtrl = event.ctrlKey || event.metaKey;
    const pressed = `${withCtrl ? "Ctrl+" : ""}${withCtrl && event.shiftKey ? "Shift+" : ""}${event.key.length === 1 ? event.key.toLowerCase() : event.key}`;
    const actions = {
      "Ctrl+k": () => {
        toggle($("#left"), true);
        $("#search").select();
      },
      "Ctrl+Shift+o": newChat,
      "Ctrl+b": () => toggle($("#left")),
      "Ctrl+.": () => (isOpen(drawer()) ? closeDrawer() : openDrawer("settings")),
      "?": isWriting ? null : showKeys,
      Escape: runningTurn() ? stopReply : isOpen(drawer()) ? closeDrawer : null,
    };
    const action = actions[pressed];
    if (!action || event.isComposing) return;
    event.preventDefault();
    action();
  });
}

listeners.chat = takeChat;
listeners.status = (status) => {
  server.status = status;
  showHeader();
  if (!turns.length) showStart();
};
listeners.reset = tried(async () => {
  await readServer();
  await readChats();
  if (chat) await openChat(chat.id);
});

async function readServer() {
  server = await api("GET", "/state");
  lastId = String(server.seq ?? "");
  if (server.notice) notify(server.notice);
  showHeader();
}

function startHeader() {
  $("#show-chats").onclick = () => toggle($("#left"));
  $("#show-settings").onclick = () => (isOpen(drawer()) ? closeDrawer() : openDrawer("settings"));
  $("#close-drawer").onclick = closeDrawer;
  $("#model").onclick = () => openDrawer("settings", "model");
  $("#method").onchange = ({ target }) => {
    changeSettings({ method: target.value, parameters: {} });
    showFields();
  };
  for (const id of ["left", "right"]) {
    for (const one of $$(`[aria-controls=${id}]`)) one.ariaExpanded = String(isOpen($(`#${id}`)));
  }
}

const FACES = {
  "show-chats": "menu", "show-settings": "gear", "to-end": "down", attach: "clip", send: "send", stop: "stop",
  incognito: "hide", theme: "theme", help: "help", more: "more", "close-drawer": "close",
};

// Gradio makes the page's three parts; each tells when it is there.
let isStarting = false;
let hasStarted = false;
async function start() {
  if (isStarting || !$("#chats") || !$("#composer") || !$("#drawer-title") || !$("#right")) return;
  isStarting = true;
  useTheme(memory.get("theme"));
  $(".gradio-container").prepend($(".skip")); // the first stop of Tab
  for (const [id, name] of Object.entries(FACES)) $(`#${id}`).append(icon(name));
  $("#new").append(icon("plus"), "New chat");
  startChats();
  startTranscript();
  startComposer();
  startHeader();
  startKeys();
  await tried(readServer)();
  const { method } = document.documentElement.dataset; // of --method
  useSettings({ ...memory.get("settings"), ...(method && { method }) });
  await readChats();
  window.addEventListener("hashchange", followAddress);
  window.addEventListener("popstate", followAddress);
  showTurns();
  restoreDraft();
  await followAddress();
  hasStarted = true;
  listen();
  focusBox();
  document.documentElement.dataset.ready = "";
  await tried(importOld)();
}
document.addEventListener("part", start);
start();
