// The list of chats at the left: search, names, pins, export and import.

import {
  $, $$, UP_DOWN, askFor, button, chooseFiles, h, iconButton, makeGroup, memory, notify, openMenu, render,
  roving, setText, step, toClipboard, tried,
} from "./dom.js";
import { api, listeners } from "./api.js";
import { switchTheme, toggle } from "./settings.js";
import { chat, isIncognito, newChat, setChat } from "./transcript.js";

let chats = []; // as GET page/chats lists them: pinned first, then the latest
let hasOlder = false; // chats than these

const AT_ONCE = 100;
export const readChats = tried(async (before = []) => {
  const query = new URLSearchParams({ limit: AT_ONCE });
  if (before.length) query.set("before", before.at(-1).id);
  const { chats: found } = await api("GET", `/chats?${query}`);
  chats = [...before, ...found];
  hasOlder = found.length === AT_ONCE;
  showChats();
});

// A change of a chat, which the stream tells of, also if this page asked for it.
let drawing = 0; // once for all that come at a time, as those of an import
listeners.chat = (changed) => {
  chats = chats.filter((one) => one.id !== changed.id);
  if (!changed.deleted && !changed.incognito) chats.push(changed);
  chats.sort((a, b) => b.is_pinned - a.is_pinned || b.changed_at - a.changed_at);
  if (chat?.id === changed.id) {
    if (changed.deleted) newChat();
    else setChat(changed);
  }
  const { [changed.id]: _, ...others } = memory.get("drafts") ?? {};
  if (changed.deleted) memory.set("drafts", others);
  cancelAnimationFrame(drawing);
  drawing = requestAnimationFrame(showChats);
};

const DAY = 86_400_000;
function groupOf({ is_pinned, changed_at }) {
  if (is_pinned) return "Pinned";
  const today = new Date().setHours(0, 0, 0, 0);
  const at = changed_at * 1000;
  if (at >= today) return "Today";
  if (at >= today - DAY) return "Yesterday";
  return at >= today - 6 * DAY ? "This week" : "Earlier";
}

export function showChats() {
  const list = $("#list");
  document.title = chat?.title ? `${chat.title} · Speculation` : "Speculation";
  const isSearch = $("#search").value.trim() !== "";
  const rows = isSearch ? hits.map(hitRow) : chats.map(row);
  const groups = isSearch ? [] : chats.map(groupOf);
  const parts = rows.flatMap((row, n) => [groups[n] !== groups[n - 1] && h("h3", groups[n]), row]);
  const older = button("Older chats", () => readChats(chats), { class: "plain earlier" });
  const none = h("p.quiet", isSearch ? "Nothing found." : "No chats yet.");
  render(list, ...parts, !isSearch && hasOlder && older, !rows.length && none);
  const links = $$("a", list);
  roving(links, links.find((link) => link.ariaCurrent) ?? links[0]);
}

function row(one) {
  const title = one.title || "Untitled";
  const current = one.id === chat?.id && "true";
  const href = here(`#chat=${one.id}`);
  const menu = ({ currentTarget }) => openMenu(currentTarget, actionsOf(one));
  return h(
    "div",
    { class: "row", id: `chat-${one.id}` },
    h("span.dot", { role: "img", "aria-label": "is replying", hidden: !one.running }),
    h("a", { href, dir: "auto", title, "aria-current": current }, title),
    iconButton("more", `Actions for ${title}`, menu, { tabindex: -1, "aria-haspopup": "menu" }),
  );
}

const changeChat = tried(({ id }, fields) => api("PATCH", `/chats/${id}`, fields));

function actionsOf(one) {
  return [
    ["Rename…", () => rename(one)],
    [one.is_pinned ? "Unpin" : "Pin", () => changeChat(one, { is_pinned: !one.is_pinned })],
    one.leaf && ["Duplicate", tried(() => duplicate(one.id, one.leaf))],
    ["Copy link", () => copyLink(`#chat=${one.id}`)],
    ["Export as Markdown", () => exportChat(`/chats/${one.id}/export?format=md`)],
    ["Export as JSON", () => exportChat(`/chats/${one.id}/export?format=json`)],
    ["Delete", tried(() => deleteChat(one))],
  ];
}

async function rename(one) {
  const title = await askFor("Name of the chat", one.title);
  if (title) changeChat(one, { title });
}

export async function duplicate(id, turn) {
  const copy = await api("POST", `/chats/${id}/duplicate`, { turn });
  location.hash = `#chat=${copy.id}`;
}

export const here = (hash) => location.href.split("#")[0] + hash;

export function copyLink(hash) {
  toClipboard(here(hash));
  notify("Copied the link");
}

async function deleteChat({ id, title }) {
  await api("DELETE", `/chats/${id}`);
  notify(`Deleted “${title || "Untitled"}”`, "Undo", () => api("POST", `/chats/${id}/restore`));
}

// Search

let hits = [];
let nSearches = 0; // a new search may start before the last one has ended
const search = tried(async () => {
  const mine = ++nSearches;
  await new Promise((done) => setTimeout(done, 150)); // the server reads all texts, so not at each key
  if (mine !== nSearches) return;
  const text = $("#search").value.trim();
  const found = text ? await api("GET", `/search?q=${encodeURIComponent(text)}`) : { hits: [], n: 0 };
  if (mine !== nSearches) return;
  hits = found.hits;
  const all = found.n === 1 ? "1 hit" : `${found.n.toLocaleString("en")} hits`;
  setText($("#found"), text && (found.n > hits.length ? `${all}, here the latest ${hits.length}` : all));
  showChats();
});

function hitRow({ chat: { id, title }, turn, snippet: parts }) {
  const hash = turn ? `#chat=${id}&turn=${turn}` : `#chat=${id}`;
  const shown = parts.map((part, at) => (at % 2 ? h("mark", part) : part));
  const snippet = h("span.snippet", { dir: "auto" }, ...shown);
  const name = h("b", { dir: "auto" }, title || "Untitled");
  return h("div.row.hit", h("a", { href: here(hash) }, name, snippet));
}

// Export and import

const exportChat = (path) => h("a", { href: `page${path}`, download: "" }).click();

const importFile = tried(async ([file]) => {
  setText($("#found"), `Reading ${file.name}`);
  const { chats: added, refused } = await api("POST", "/import", file).finally(() => setText($("#found"), ""));
  const n = added.length;
  notify([`Imported ${n === 1 ? "1 chat" : `${n} chats`}`, ...refused].join(". "));
});

listeners.import = ({ done, total }) => setText($("#found"), `Importing: ${done} of ${total} chats`);

// The left side's buttons and keys

// On a phone the list covers the chat.
export function leaveList() {
  if (innerWidth <= 768) toggle($("#left"), false);
}

export function startChats() {
  $("#new").onclick = () => newChat();
  $("#close-chats").onclick = () => (leaveList(), $("#show-chats").focus());
  $("#incognito").onclick = ({ currentTarget }) => {
    newChat(!isIncognito);
    currentTarget.ariaPressed = String(isIncognito);
  };
  $("#search").oninput = search;
  $("#theme").onclick = switchTheme;
  $("#more").onclick = ({ currentTarget }) =>
    openMenu(currentTarget, [
      ["Import chats…", () => chooseFiles({ accept: ".json,application/json" }, importFile)],
      ["Export all chats", () => exportChat("/export")],
      ["Requests to the server", async () => (await import("./requests.js")).openRequests()],
    ]);
  $$("#chats > .row").forEach(makeGroup);
  $("#list").onclick = ({ target }) => target.closest("a") && leaveList(); // also from the open chat
  $("#list").onkeydown = (event) => {
    const link = event.target.closest(".row")?.querySelector("a");
    const more = link?.nextSibling; // a hit of the search has none
    const links = $$("a", $("#list"));
    const next = step(links, event.key, UP_DOWN);
    const one = chats.find(({ id }) => `chat-${id}` === link?.parentElement.id);
    if (next) roving(links, next, true);
    else if (event.key === "ArrowRight") more?.focus();
    else if (event.key === "ArrowLeft") link?.focus();
    else if (event.key === "F2" && one) rename(one);
    else if (event.key === "Delete" && one) tried(deleteChat)(one);
    else return;
    event.preventDefault();
  };
}
