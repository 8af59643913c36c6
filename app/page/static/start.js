// The start page, the shortcuts, and the start of it all.

const TEXT = `The old lighthouse stands on a rock near the harbour. Every evening its lamp turns, and the ships in \
the bay find their way home. Last winter a storm broke three of its windows, and the keeper repaired them himself. \
Visitors can climb the stairs on Sundays from ten to four. At the top there is a small room with a round window. From \
there you can see the whole coast, the two islands and, on clear days, the mountains behind the town. The keeper sells \
postcards and tells stories about the ships that he has seen. Children like the brass bell best. It is rung at noon, and \
you can hear it as far as the market.`;
const TYPOS = `The old lighthous stands on a rock near the harbour. Every evening its lamp turns, and the ships in the bay \
find there way home. Last winter a storm broke three of its windows, and the keeper repaird them himself. Visiters can \
climb the stairs on Sundays from ten to four.`;
const CODE = `import csv
from pathlib import Path

FOLDER = Path("orders")
TAX = 0.19


def read_orders(path):
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def price(order):
    amount = int(order["amount"])
    return amount * float(order["price"])


def total(orders):
    net = sum(price(order) for order in orders)
    return round(net * (1 + TAX), 2)


def print_orders(orders):
    for order in orders:
        name = order["name"]
        print(f"{name:20} {price(order):10.2f}")
    print(f"{'total':20} {total(orders):10.2f}")


def main():
    for path in sorted(FOLDER.glob("*.csv")):
        print(path.name)
        print_orders(read_orders(path))


if __name__ == "__main__":
    main()`;

// Title, message, and the name and text of a file. Drafts are copied from the text so far, so they pay where a
// reply repeats it: all but the last one do. The first one shows drafts with every model that was tried.
const PROMPTS = [
  ["Copy a text", `Copy this text word for word.\n\n${TEXT}`],
  ["Change a line of code", "Change the value of TAX to 0.21.", "shop.py", CODE],
  ["Correct a text", `Correct the spelling mistakes in this text. Change nothing else.\n\n${TYPOS}`],
  ["Write HTML", "Write an HTML list with ten items, from Item 1 to Item 10."],
  ["Ask a question: little to copy, so drafts do not pay", "What is the capital of France, and why do people like it?"],
];

function showStart() {
  const model = server.status?.model;
  const size = model ? `${model.name}: ${model.description}` : "No model is loaded yet";
  const cards = PROMPTS.map(([title, text, name, code]) => {
    const use = () => {
      setBox(text);
      setFiles(code ? [{ name, text: code, size: bytesOf(code), leads: true }] : []);
      send();
    };
    const prompt = code ? `${name}:\n\`\`\`\n${code}\n\`\`\`\n\n${text}` : text;
    const race = () => openRace({ prompt, start: true });
    const shown = `${text.split("\n")[0]}${name ? ` (${name})` : ""}`;
    return h(
      "li",
      {},
      h("button", { type: "button", class: "card", onclick: use }, h("b", {}, title), h("span", {}, shown)),
      h("button", { type: "button", class: "race-card", onclick: race, "aria-label": `Race: ${title}` }, icon("race"), "Race"),
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
  makeGroup($("#start .cards"));
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
  refreshModels();
};
listeners.reset = tried(async () => {
  await readServer();
  await readChats();
  if (chat) await openChat(chat.id);
});

async function readServer() {
  server = await api("GET", "/state");
  lastId = String(server.seq ?? "");
  for (const method of server.methods) if (method.name === PLAIN) method.title = "Plain decoding";
  if (server.notice) notify(server.notice);
  showHeader();
}

function startHeader() {
  $("#show-chats").onclick = () => toggle($("#left"));
  $("#show-settings").onclick = () => (isOpen(drawer()) ? closeDrawer() : openDrawer("settings"));
  $("#close-drawer").onclick = closeDrawer;
  $("#model").onclick = openModels;
  $("#method").onchange = ({ target }) => chooseMethod(target.value);
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
