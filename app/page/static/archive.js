// Exports all chats to one file, and imports such a file:
// { "format": "speculation-chats", "version": 1, "chats": [{ "name", "title", "named", "at", "turns" }] }
// Turns are as the server writes them (saved.py). Loaded in the page's head.

const FORMAT = "speculation-chats";
const FORMAT_VERSION = 1;

function showStatus(text) {
  document.querySelector("#chats .status").textContent = text;
}

// Adds each text as it is: all together may be too long for one string.
async function exportChats() {
  const parts = [];
  let nUnread = 0;
  for (const { name } of await store.list()) {
    const { chat, text } = (await store.read(name)) ?? {};
    if (!chat) continue; // it was just deleted
    try {
      asTurns(JSON.parse(text));
    } catch (error) {
      console.warn(error);
      nUnread += 1;
      continue;
    }
    const { title, named, at } = chat;
    const about = JSON.stringify({ name, title, named, at }).slice(1, -1);
    parts.push(new Blob([parts.length ? ",\n" : "\n", `{${about},"turns":${text}}`]));
  }
  const head = `{"format":"${FORMAT}","version":${FORMAT_VERSION},"chats":[`;
  const file = new Blob([head, ...parts, "\n]}\n"], { type: "application/json" });
  download(file, `chats-${new Date().toISOString().slice(0, 10)}.json`);
  const rest = nUnread ? `; ${countChats(nUnread)} could not be read and was left out` : "";
  showStatus(`Exported ${countChats(parts.length)}${rest}.`);
}

const countChats = (n) => (n === 1 ? "1 chat" : `${n} chats`);

function asTurns(turns) {
  const isReply = (reply) => reply === null || (Array.isArray(reply?.pieces) && "done" in reply);
  const isTurn = (turn) => typeof turn?.user === "string" && isReply(turn.reply);
  if (!Array.isArray(turns) || !turns.length || !turns.every(isTurn)) {
    throw new Error("has turns that cannot be read");
  }
  return turns;
}

// Checks the whole file before anything is saved.
function chatsIn(text) {
  let data;
  try {
    data = JSON.parse(text);
  } catch {
    throw new Error("it is not JSON or is incomplete");
  }
  if (data?.format !== FORMAT) throw new Error("it is not an export of chats");
  if (data.version > FORMAT_VERSION) throw new Error("a newer version of this program wrote it");
  if (data.version !== FORMAT_VERSION || !Array.isArray(data.chats)) throw new Error("it has no chats");
  return data.chats.map((chat, i) => {
    const { name, title, at } = chat ?? {};
    try {
      if (!name || ![name, title].every((text) => typeof text === "string") || !store.isDate(at)) {
        throw new Error("has no valid name, title or date");
      }
      const text = JSON.stringify(asTurns(chat.turns));
      return { chat: { name, title, named: chat.named === true, at }, text };
    } catch (error) {
      throw new Error(`its chat ${i + 1} ${error.message}`);
    }
  });
}

async function importChats(file) {
  const n = { added: 0, known: 0, beyond: 0 };
  let why = "";
  try {
    const found = chatsIn(await file.text());
    found.sort((a, b) => b.chat.at - a.chat.at); // if there is no room for all, keep the latest
    for (const { chat, text } of found) n[await store.add(chat, text)] += 1;
  } catch (error) {
    console.warn(error);
    why = error instanceof DOMException ? store.reason(error) : error.message;
  }
  const parts = [];
  if (n.added || !why) parts.push(`Imported ${countChats(n.added)}`);
  if (n.known) parts.push(`${countChats(n.known)} already here, unchanged or newer`);
  if (n.beyond) parts.push(`no room for ${countChats(n.beyond)}`);
  if (why) parts.push(`${file.name} cannot be imported: ${why}`);
  showStatus(`${parts.join("; ")}.`);
}

document.addEventListener("click", ({ target }) => {
  const act = target.closest("#chats [data-all]")?.dataset.all;
  if (act === "export") exportChats().catch((error) => showStatus(`${store.reason(error)}.`));
  if (act !== "import") return;
  const input = document.createElement("input");
  input.type = "file";
  input.accept = ".json,application/json";
  input.onchange = () => importChats(input.files[0]);
  input.click();
});
