// The open chat: its turns, their actions, and replies as they grow.

import {
  $, $$, LEFT_RIGHT, UP_DOWN, activeIn, button, fromHtml, h, memory, notify, openDialog, openMenu, roving,
  setText, step, svg, toClipboard, tried,
} from "./dom.js";
import { api, listeners } from "./api.js";
import { settings, showGauge, useSettings } from "./settings.js";
import { copyLink, duplicate, here, leaveList, showChats } from "./chats.js";
import { focusBox, isFleeting, keepDraft, restoreDraft, runningTurn, showComposer } from "./composer.js";
import { openReplay } from "./replay.js";
import { openRace } from "./race.js";

export let chat = null; // as ChatJson; null: a new one
export let isIncognito = false; // whether the next new chat is kept nowhere
export let turns = []; // the active path, as TurnJson
let hasEarlier = false; // turns before these
const INCOGNITO = "Incognito: this chat is in memory alone and in no list. It ends with the server.";
const LEFT_OUT = "The model no longer reads the turns above: its context of";

let nOpened = 0; // another chat may be opened before the last one has come
async function openChat(id, turn = null) {
  const mine = ++nOpened;
  const got = await api("GET", `/chats/${id}?limit=30`).catch((error) => {
    if (mine === nOpened) throw error;
  });
  if (mine !== nOpened) return;
  keepDraft();
  chat = got.chat;
  useSettings(chat.settings);
  takeTurns(got);
  restoreDraft();
  if (turn) await goTo(turn);
  else scrollToEnd();
}

export const setChat = (now) => (chat = now);

// Reads the open chat again, after events were missed.
export async function readChat() {
  const mine = nOpened;
  const got = chat && (await api("GET", `/chats/${chat.id}?limit=${Math.max(30, turns.length)}`));
  if (!got || mine !== nOpened) return;
  chat = got.chat;
  const known = new Map(turns.map((turn) => [JSON.stringify(turn), turn]));
  takeTurns({ ...got, turns: got.turns.map((turn) => known.get(JSON.stringify(turn)) ?? turn) });
}

export function newChat(incognito = isIncognito) {
  nOpened++;
  leaveList();
  keepDraft();
  const wasFleeting = isFleeting();
  chat = null;
  isIncognito = incognito;
  if (location.hash) history.pushState(null, "", here(""));
  useSettings(wasFleeting && !isIncognito ? memory.get("settings") : settings);
  takeTurns({ turns: [], has_earlier: false });
  restoreDraft();
  focusBox();
}

// The address tells which chat is open, so that links and the browser's Back work.
export const followAddress = tried(async () => {
  const { chat: id, turn } = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  leaveList();
  if (!id) return chat && newChat();
  try {
    if (id !== chat?.id) await openChat(id, turn);
    else if (turn) await goTo(turn);
  } catch (error) {
    newChat();
    throw error;
  }
});

function takeTurns(got) {
  turns = got.turns;
  hasEarlier = got.has_earlier;
  showTurns();
}

async function readEarlier() {
  const [first] = turns;
  const { turns: before, has_earlier } = await api("GET", `/chats/${chat.id}?before=${first.id}&limit=30`);
  if (turns[0] !== first) return; // they are there already, or another chat is
  const box = $("#transcript");
  const fromEnd = box.scrollHeight - box.scrollTop;
  takeTurns({ turns: [...before, ...turns], has_earlier });
  box.scrollTop = box.scrollHeight - fromEnd;
}

// Shows a turn of this chat, wherever it is: further up, or on another branch.
async function goTo(id) {
  const isHere = () => turns.some((turn) => String(turn.id) === String(id));
  while (!isHere() && hasEarlier) await readEarlier();
  if (!isHere()) {
    await api("POST", `/turns/${id}/choose`);
    return openChat(chat.id, isHere() ? id : null);
  }
  const article = $(`#turn-${id}`);
  article.scrollIntoView({ block: "center" });
  setCurrent(article, true);
  article.classList.add("found");
  setTimeout(() => article.classList.remove("found"), 2500);
}

// Turns that came, or another branch: they replace what followed the turn `after`.
function takeBranch({ after, turns: added }) {
  const at = turns.findIndex(({ id }) => id === after);
  const isWhole = !added.length || added[0].parent === after;
  if (!isWhole || (after !== null && at < 0)) return openChat(chat.id);
  if (after === null) hasEarlier = false;
  turns = [...turns.slice(0, at + 1), ...added];
  showTurns();
}

export function showTurns() {
  const box = $("#turns");
  const before = new Map($$(".turn", box).map((article) => [article.turn, article]));
  const articles = turns.map((turn) => before.get(turn) ?? articleOf(turn));
  const earlier = button("Earlier turns", tried(readEarlier), { class: "earlier" });
  box.replaceChildren(...(hasEarlier ? [earlier] : []), ...articles);
  showLeftOut();
  setCurrent(articles.at(-1));
  showChats();
  setText($("#incognito-note"), (chat ? chat.incognito : isIncognito) ? INCOGNITO : "");
  $("#start").hidden = turns.length > 0;
  showGauge();
  showComposer();
}

// Marks the turn that the last prompt began with, if it left some out.
function showLeftOut() {
  const { reads_from, n_ctx } = turns.findLast(({ role }) => role !== "user") ?? {};
  for (const article of $$("#turns .turn")) {
    const begins = article.turn.id === reads_from;
    setText($(".left-out", article), begins ? `${LEFT_OUT} ${n_ctx} tokens is full` : "");
  }
}

function articleOf(turn) {
  const article = $("#turn").content.firstElementChild.cloneNode(true);
  article.id = `turn-${turn.id}`;
  article.turn = turn;
  article.classList.add(turn.role === "user" ? "user" : "reply");
  takeBlocks($(".reasoning", article), 0, turn.reasoning);
  takeBlocks($(".answer", article), 0, turn.blocks);
  fillTurn(article);
  return article;
}

// Shows all of a turn but its blocks.
function fillTurn(article) {
  const { id, role, text, siblings = [], files = [], cells = [], ...turn } = article.turn;
  const isReply = role !== "user";
  const isRunning = turn.state === "running";
  const seconds = Math.round(turn.seconds_thinking ?? 0);
  const isThinking = isRunning && !turn.blocks.length;
  article.classList.toggle("live", isRunning);
  article.ariaBusy = String(isRunning);
  setText($("h2", article), isReply ? "Reply" : "You");
  setText($(".said", article), isReply ? "" : text);
  setText($("summary", article), isThinking ? "Thinking" : seconds ? `Thought for ${seconds} s` : "Thoughts");
  setText($(".notice", article), turn.notice ?? "");
  setText($(".error", article), turn.error ?? "");
  setText($(".sentence", article), turn.sentence ?? "");
  const chips = files.map(({ name, size }, n) => {
    const parts = [h("bdi", {}, name), h("span", {}, size)];
    return h("li", {}, button(parts, null, { "data-action": "file", "data-n": n }));
  });
  $(".files", article).replaceChildren(...chips);
  const facts = [["Method", turn.method], ["Model", turn.model], ...(turn.figures ?? [])];
  const known = facts.filter(([, value]) => value);
  $("dl", article).replaceChildren(
    ...known.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]),
  );
  const bar = $(".cells", article);
  bar.replaceChildren(...(cells.length ? [cellsOf(cells)] : []));
  bar.ariaLabel = bar.title = `Replay: ${cells.length} steps`;
  const at = siblings.indexOf(id);
  setText($(".siblings span", article), `${at + 1}/${siblings.length}`);
  const shown = {
    ".thoughts": turn.reasoning?.length,
    ".answer": isReply,
    ".files": files.length,
    ".speed": turn.sentence || cells.length,
    ".actions": !isRunning,
    ".siblings": siblings.length > 1,
    ".cells, .actions [data-action=replay]": cells.length,
    "[data-action=copy], [data-action=race]": isReply && text,
    "[data-action=retry]": isReply,
    "[data-action=continue]": turn.can_continue,
  };
  for (const [selector, isShown] of Object.entries(shown)) {
    for (const one of $$(selector, article)) one.hidden = !isShown;
  }
  $("[data-action=earlier]", article).disabled = at === 0;
  $("[data-action=later]", article).disabled = at === siblings.length - 1;
}

function takeBlocks(box, from, blocks = []) {
  while (box.children.length > from) box.lastChild.remove();
  for (const html of blocks) {
    const block = h("div", { class: "block", dir: "auto" });
    block.append(fromHtml(html));
    box.append(block);
  }
}

// [ms, tokens] of each step as an SVG: width = time, height = tokens.
export function cellsOf(cells) {
  const top = Math.max(4, ...cells.map(([, n]) => n));
  const paths = { plain: "", fast: "" };
  let at = 0;
  for (const [ms, n] of cells) {
    paths[n > 1 ? "fast" : "plain"] += `M${at} ${top}h${ms * 0.9}v${-n}h${-ms * 0.9}z`;
    at += ms;
  }
  const shapes = Object.entries(paths).map(([name, d]) => svg("path", { class: name, d }));
  const box = { viewBox: `0 0 ${at || 1} ${top}`, preserveAspectRatio: "none", "aria-hidden": "true" };
  return svg("svg", { class: "steps", ...box }, ...shapes);
}

// What the buttons of a turn do, by their data-action.
const ACTIONS = {
  replay: openReplay,
  copy: ({ text }, pressed) => copyText(text, pressed),
  "copy-code": (_, pressed) => copyText($("code", pressed.closest(".code")).textContent, pressed),
  retry: (turn) => replyAgain(turn, "/retry"),
  continue: (turn) => replyAgain(turn, "/continue"),
  edit: editTurn,
  race: (turn) => openRace({ turn }),
  earlier: (turn) => chooseVersion(turn, -1),
  later: (turn) => chooseVersion(turn, 1),
  more: openTurnMenu,
  figures: (_, pressed) => {
    const figures = pressed.nextElementSibling;
    figures.hidden = !figures.hidden;
    pressed.ariaExpanded = String(!figures.hidden);
  },
  file: async ({ id }, { dataset }) => {
    const { name, text } = await api("GET", `/turns/${id}/files/${dataset.n}`);
    openDialog(name, h("pre", { class: "file", tabindex: 0, dir: "auto" }, text)).classList.add("wide");
  },
};

function replyAgain({ id }, path) {
  const error = $(`#turn-${id} .error`); // if the reply begins, it gets another one
  return tried(
    () => api("POST", `/turns/${id}${path}`, { settings }),
    () => error,
  )();
}

const chooseVersion = ({ id, siblings }, by) =>
  api("POST", `/turns/${siblings[siblings.indexOf(id) + by]}/choose`);

function openTurnMenu(turn, anchor) {
  const isReply = turn.role !== "user";
  openMenu(anchor, [
    ["Duplicate the chat up to here", tried(() => duplicate(chat.id, turn.id))],
    ["Copy link", () => copyLink(`#chat=${chat.id}&turn=${turn.id}`)],
    !isReply && turn.text && ["Copy text", () => copyText(turn.text, anchor)],
    !isReply && ["Race with this prompt", () => openRace({ prompt: turn.text })],
    isReply && [isFilled() ? "Underline what was drafted" : "Fill what was drafted", fillDrafts],
    ["Delete this and what follows", tried(() => deleteTurn(turn))],
  ]);
}

const isFilled = () => $("#turns").classList.contains("filled");
function fillDrafts() {
  memory.set("filled", $("#turns").classList.toggle("filled"));
}

async function deleteTurn(turn) {
  const n = turns.length - turns.indexOf(turn);
  await api("DELETE", `/turns/${turn.id}`);
  const undo = () => api("POST", `/turns/${turn.id}/restore`);
  notify(n === 1 ? "Deleted one turn" : `Deleted ${n} turns`, "Undo", undo);
}

// Shows a turn's form. A changed message is answered anew; a changed reply stands as it is.
export function editTurn({ id, role, text }) {
  const article = $(`#turn-${id}`);
  const form = $("form", article);
  const area = $("textarea", form);
  const isMessage = role === "user";
  if (article.classList.contains("editing")) return area.focus();
  const end = () => {
    article.classList.remove("editing");
    setCurrent(article, true);
  };
  $(".primary", form).textContent = isMessage ? "Send" : "Save";
  area.ariaLabel = isMessage ? "Message" : "Reply";
  area.value = text ?? "";
  setText($(".error", form), "");
  form.onreset = end;
  form.onsubmit = tried(
    async (event) => {
      event.preventDefault();
      await api("POST", `/turns/${id}/edit`, { text: area.value, settings });
      end();
    },
    () => $(".error", form),
  );
  form.onkeydown = (event) => {
    if (event.key === "Escape") {
      event.stopPropagation();
      form.reset();
    } else if (event.key === "Enter" && isMessage && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      form.requestSubmit();
    }
  };
  article.classList.add("editing");
  area.focus();
  area.setSelectionRange(area.value.length, area.value.length);
}

function copyText(text, button) {
  toClipboard(text);
  button.classList.add("done");
  setTimeout(() => button.classList.remove("done"), 1500);
  setText($("#said"), "Copied");
}

// Tab reaches one button of one turn, the current one. ← and → go from button to button, ↑ and ↓ from turn
// to turn.
function setCurrent(article, focuses = false) {
  for (const one of $$("#turns .turn :is(button, a, summary, pre, table):not(form *)")) one.tabIndex = -1;
  if (!article) return;
  const items = activeIn(article);
  roving(items, items.find((item) => item === document.activeElement) ?? items[0]);
  for (const part of $$("pre, table", article)) part.tabIndex = 0;
  if (focuses) article.focus({ preventScroll: true });
}

function moveInTurns(event) {
  const { key, target } = event;
  if (target.closest("form, pre, table")) return;
  const turn = step($$("#turns .turn"), key, UP_DOWN);
  const article = target.closest(".turn");
  if (article && key in LEFT_RIGHT) step(activeIn(article), key)?.focus();
  else if (turn) {
    setCurrent(turn, true);
    turn.scrollIntoView({ block: "nearest" });
  } else return;
  event.preventDefault();
}

// A running reply, by the stream

listeners.turn = ({ chat: id, turn: n, part, from, same, blocks, set }) => {
  const turn = id === chat?.id && turns.find((one) => one.id === n);
  if (!turn) return;
  const article = $(`#turn-${n}`);
  const isAtEnd = nearEnd();
  if (set) {
    Object.assign(turn, set);
    fillTurn(article);
    showLeftOut();
    if ("state" in set) setCurrent(article);
    if (set.state && set.state !== "running") setText($("#said"), set.error || "The reply is complete");
    showGauge();
    showComposer();
  } else {
    const name = part === "answer" ? "blocks" : part;
    const known = turn[name] ?? [];
    const begun = (known[from] ?? "").slice(0, same); // the first block begins as before
    turn[name] = [...known.slice(0, from), ...blocks.map((html, at) => (at ? html : begun + html))];
    $(".thoughts", article).hidden = !turn.reasoning?.length;
    takeBlocks($(`.${part}`, article), from, turn[name].slice(from));
  }
  if (isAtEnd) scrollToEnd();
};

listeners.turns = tried(async (event) => {
  if (event.chat !== chat?.id) return;
  const isAtEnd = nearEnd();
  await takeBranch(event);
  if (isAtEnd || runningTurn()) scrollToEnd();
  if (runningTurn()) setText($("#said"), "The model is replying");
});

const nearEnd = () => {
  const box = $("#transcript");
  return box.scrollHeight - box.scrollTop - box.clientHeight < 60;
};

// The start page may be longer than the window, too, but has no reply to go to.
const showToEnd = () => ($("#to-end").hidden = !turns.length || nearEnd());

function scrollToEnd() {
  const box = $("#transcript");
  box.scrollTop = box.scrollHeight;
}

export function startTranscript() {
  const box = $("#transcript");
  box.onscroll = showToEnd;
  new ResizeObserver(showToEnd).observe($("#turns"));
  $("#to-end").onclick = scrollToEnd;
  $("#turns").classList.toggle("filled", memory.get("filled") ?? false);
  box.addEventListener("click", (event) => {
    const pressed = event.target.closest("[data-action]");
    if (pressed) tried(ACTIONS[pressed.dataset.action])(pressed.closest(".turn").turn, pressed);
  });
  box.addEventListener("focusin", ({ target }) => {
    const article = target.closest(".turn");
    if (article) setCurrent(article);
  });
  box.addEventListener("keydown", moveInTurns);
}
