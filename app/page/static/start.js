// The cards of the start page, the shortcuts, and the start of it all.

// Each card of main.html has a message, maybe with a file.
function startCards() {
  for (const card of $$("#start .cards li")) {
    const text = $(".prompt", card).textContent;
    const file = $(".attached", card);
    const [name, code] = [file?.dataset.name, file?.textContent];
    $(".card", card).onclick = () => {
      compose(text, file ? [{ name, text: code, size: bytesOf(code), leads: true }] : []);
      send();
    };
    const prompt = file ? `${name}:\n\`\`\`\n${code}\n\`\`\`\n\n${text}` : text;
    $(".race-card", card).onclick = () => openRace({ prompt, start: true });
  }
  makeGroup($("#start .cards"));
}

function showStart() {
  const model = server.status?.model;
  const about = model
    ? `${model.name}: ${model.description}. ${expectationOf(model)}`
    : "No model is loaded yet.";
  setText($("#about"), about);
}

// What to expect of a model of this size. The demo model that is included only shows the methods.
function expectationOf(model) {
  const [, number, unit] = model?.description.match(/([\d.]+)([MB])\b/) ?? [];
  const millions = number * (unit === "B" ? 1000 : 1);
  if (millions < 100) return "It is a small demo model, and its answers are not reliable.";
  return millions < 2000 ? "It is a small model: good for short and simple texts, and often wrong." : "";
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
  server.status = status;
  showHeader();
  if (status.loading?.model !== before.loading?.model || status.error !== before.error) refreshModels();
  // Else an open list would close.
  if (!document.activeElement.matches(".model select")) showModels();
};
listeners.reset = tried(async () => {
  await readServer();
  await readChats();
  if (!chat) return;
  const before = nOpened;
  const got = await api("GET", `/chats/${chat.id}?limit=${Math.max(30, turns.length)}`);
  if (before !== nOpened) return;
  chat = got.chat;
  const known = new Map(turns.map((turn) => [JSON.stringify(turn), turn]));
  takeTurns({ ...got, turns: got.turns.map((turn) => known.get(JSON.stringify(turn)) ?? turn) });
});

// Asks until the server answers: it may just be starting again.
async function readServer() {
  for (;;) {
    try {
      server = await api("GET", "/state");
      break;
    } catch (error) {
      console.warn(error);
      setText($("#offline"), error.cause ? OFFLINE : error.message);
      await new Promise((done) => setTimeout(done, AGAIN_MS));
    }
  }
  setText($("#offline"), "");
  lastId = String(server.seq ?? "");
  for (const method of server.methods) if (method.name === PLAIN) method.title = "Plain decoding";
  if (server.notice) notify(server.notice);
  showHeader();
}

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
let hasStarted = false;
async function start() {
  if (isStarting || !$("#chats") || !$("#composer") || !$("#drawer-title") || !$("#right")) return;
  isStarting = true;
  useTheme(memory.get("theme"));
  $(".gradio-container").prepend($(".skip")); // the first stop of Tab
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
  hasStarted = true;
  listen();
  focusBox();
  document.documentElement.dataset.ready = "";
}
document.addEventListener("part", start);
start();
