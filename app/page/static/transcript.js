// The open chat: its turns, their actions, and replies as they grow.

import {
  $, $$, LEFT_RIGHT, UP_DOWN, activeIn, button, change, fromHtml, h, iconButton, memory, notify, openDialog,
  openMenu, roving, setText, showAt, step, svg, toClipboard, tried,
} from "./dom.js";
import { api, listeners, showFirst } from "./api.js";
import { settings, showGauge, showSystem, useSettings, usual } from "./settings.js";
import { copyLink, duplicate, here, leaveList, showChats } from "./chats.js";
import { focusBox, keepDraft, restoreDraft, runningTurn, showComposer } from "./composer.js";
import { openReplay } from "./replay.js";
import { openRace } from "./race.js";
import { callOf } from "./tools.js";
import { openModels } from "./models.js";

export let chat = null; // as ChatJson; null: a new one
export let isIncognito = false; // whether the next new chat is kept nowhere
export let turns = []; // the active path, as TurnJson
let hasEarlier = false; // turns before these
let shownTo = 0; // the last event that they contain
const INCOGNITO = "Incognito: this chat is in memory alone and in no list. It ends with the server.";
const LEFT_OUT = "The model no longer reads the turns above: its context of";

let nOpened = 0; // another chat may be opened before the last one has come
// Shows a chat as the server has it: another one, or the open one after events were missed.
function readChat(id) {
  const mine = id === chat?.id ? nOpened : ++nOpened;
  const name = id?.replace(/[^\w-]/g, "") || "none"; // a link may be wrong
  return showFirst(async () => {
    const isOpen = id === chat?.id;
    const n = isOpen ? Math.max(30, turns.length) : 30;
    const got = await api("GET", `/chats/${name}?limit=${n}`).catch((error) => {
      if (mine === nOpened) throw error;
    });
    if (mine !== nOpened) return;
    if (!isOpen) keepDraft();
    chat = got.chat;
    if (!isOpen) useSettings(chat.settings);
    const known = new Map(turns.map((turn) => [JSON.stringify(turn), turn]));
    takeTurns({ ...got, turns: got.turns.map((turn) => known.get(JSON.stringify(turn)) ?? turn) });
    if (!isOpen) restoreDraft();
  });
}

async function openChat(id, turn = null) {
  await readChat(id);
  if (id !== chat?.id) return; // another one was opened meanwhile
  await (turn ? goTo(turn) : scrollToEnd());
}

export const readAgain = () => chat && readChat(chat.id);
export const setChat = (now) => (chat = now);

export function newChat(incognito = isIncognito) {
  nOpened++;
  leaveList();
  keepDraft();
  chat = null;
  isIncognito = incognito;
  if (location.hash) history.pushState(null, "", here(""));
  useSettings(usual());
  takeTurns({ turns: [], has_earlier: false });
  $("#transcript").scrollTop = 0;
  restoreDraft();
  focusBox();
}

// The address tells which chat is open, so that links and the browser's Back work.
export const followAddress = tried(async () => {
  const { chat: id, turn } = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  leaveList();
  if (!location.hash) return chat && newChat();
  try {
    if (!id || id !== chat?.id) await openChat(id, turn);
    else if (turn) await goTo(turn);
  } catch (error) {
    newChat();
    throw error;
  }
});

function takeTurns(got) {
  turns = got.turns;
  hasEarlier = got.has_earlier;
  shownTo = got.seq ?? shownTo;
  showTurns();
}

// Earlier turns come when their button does. On a busy machine it may have come and gone meanwhile.
const nearTop = new IntersectionObserver((seen) => seen.at(-1).isIntersecting && $("#earlier").click());

async function readEarlier() {
  const [first] = turns;
  const { turns: before, has_earlier } = await api("GET", `/chats/${chat.id}?before=${first.id}&limit=30`);
  if (turns[0] !== first) return; // they are there already, or another chat is
  const box = $("#transcript");
  const fromEnd = box.scrollHeight - box.scrollTop;
  takeTurns({ turns: [...before, ...turns], has_earlier });
  box.scrollTop = box.scrollHeight - fromEnd;
  nearTop.unobserve($("#earlier")); // it tells anew whether that is still in sight
  nearTop.observe($("#earlier"));
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
function takeBranch({ after, turns: added, is_growing }) {
  const at = turns.findIndex(({ id }) => id === after);
  const isWhole = !is_growing && (!added.length || added[0].parent === after);
  if (!isWhole || (after !== null && at < 0)) return openChat(chat.id);
  if (after === null) hasEarlier = false;
  turns = [...turns.slice(0, at + 1), ...added];
  showTurns();
}

export function showTurns() {
  const box = $("#turns");
  const before = new Map($$(".turn", box).map((article) => [article.turn, article]));
  const articles = turns.map((turn) => before.get(turn) ?? articleOf(turn));
  for (const [turn, article] of before) if (!turns.includes(turn)) article.remove();
  articles.forEach((article, n) => article === box.children[n] || box.insertBefore(article, box.children[n]));
  $("#earlier").hidden = !hasEarlier;
  showSystem();
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
  const { id, role, text, siblings = [], files = [], cells = [], reasoning = [], blocks = [], calls = [] } = turn;
  const isReply = role !== "user";
  const isRunning = turn.state === "running";
  const seconds = Math.round(turn.seconds_thinking ?? 0);
  const thoughts = isRunning && !blocks.length ? "Thinking" : seconds ? `Thought for ${seconds} s` : "Thoughts";
  const thinking = [h("summary", thoughts), markdown("reasoning", reasoning)];
  const facts = [["Method", turn.method], ["Model", turn.model], ...(turn.figures ?? [])].filter(([, value]) => value);
  const steps = `Replay: ${cells.length} steps`;
  const bar = { type: "button", class: "cells", "data-action": "replay", "aria-label": steps, title: steps };
  const at = siblings.indexOf(id);
  const versions = [
    actionButton("earlier", "Earlier version", true, { disabled: at === 0 }),
    h("span", `${at + 1}/${siblings.length}`),
    actionButton("later", "Later version", true, { disabled: at === siblings.length - 1 }),
  ];
  const speed = [
    part("button", cells.length, bar, cells.length && cellsOf(cells)),
    part("span", turn.sentence, { class: "sentence" }, turn.sentence),
    actionButton("figures", "Figures", true, { "aria-expanded": String(unfolded.has(id)) }),
    part("dl", unfolded.has(id), {}, ...facts.flatMap(([name, value]) => [h("dt", name), h("dd", value)])),
  ];
  const actions = [
    part("span", siblings.length > 1, { class: "siblings" }, ...versions),
    actionButton("copy", "Copy", isReply && text),
    actionButton("retry", isReply ? "Retry" : "Answer", true, isReply && { "aria-haspopup": "menu" }),
    actionButton("edit", "Edit"),
    actionButton("replay", "Replay", cells.length),
    actionButton("race", "Race", isReply && text),
    part("button", turn.can_continue, { type: "button", class: "plain", "data-action": "continue" }, "Continue"),
    actionButton("more", "More actions", true, { "aria-haspopup": "menu" }),
  ];
  const kind = `turn ${isReply ? "reply" : "user"}${isRunning ? " live" : ""}`;
  const article = h(
    "article",
    { id: `turn-${id}`, class: kind, tabindex: -1, "aria-busy": String(isRunning) },
    part("p", false, { class: "left-out", role: "note" }),
    h("h2.unseen", isReply ? "Reply" : "You"),
    part("ul", files.length, { class: "files", "aria-label": "Attached files" }, ...files.map(fileOf)),
    part("details", reasoning.length, { class: "thoughts" }, ...thinking),
    markdown(isReply ? "answer" : "said", blocks, isReply || text),
    part("ul", calls.length, { class: "calls", "aria-label": "Calls of tools" }, ...calls.map(callOf)),
    part("p", turn.notice, { class: "notice", role: "status" }, turn.notice),
    part("p", turn.error, { class: "error", role: "alert" }, turn.error),
    part("div", turn.sentence || cells.length, { class: "speed" }, ...speed),
    part("div", !isRunning, { class: "actions" }, ...actions),
  );
  article.turn = turn;
  return article;
}

// What has nothing to show is hidden, not left out, so that every part keeps its place while the turn changes.
const part = (tag, isShown, attributes, ...children) => h(tag, { hidden: !isShown, ...attributes }, ...children);
const ICONS = { figures: "more", earlier: "left", later: "right" };
const actionButton = (action, label, isShown = true, attributes = {}) =>
  iconButton(ICONS[action] ?? action, label, null, { "data-action": action, hidden: !isShown, ...attributes });
const markdown = (name, blocks, isShown = true) =>
  part("div", isShown, { class: `markdown ${name}`, dir: "auto" }, ...blocks.map(blockOf));
const blockOf = (html) => h("div.block", { dir: "auto" }, fromHtml(html));
const fileOf = ({ name, size }, n) =>
  h("li", button([h("bdi", name), h("span", size)], null, { "data-action": "file", "data-n": n }));

const unfolded = new Set(); // the turns whose figures are shown

// Shows what has changed in a turn, unless its form is there.
function showTurn(turn) {
  const article = $(`#turn-${turn.id}`);
  if (article && !$("form", article)) change(article, articleOf(turn));
  showLeftOut();
}

// Shows these blocks in place of those after the first `from`.
function takeBlocks(box, from, blocks) {
  for (const old of [...box.children].slice(from + blocks.length)) old.remove();
  blocks.forEach((html, n) => {
    const old = box.children[from + n];
    if (old) change(old, blockOf(html));
    else box.append(blockOf(html));
  });
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
  return svg("svg.steps", { ...box }, ...shapes);
}

// What the buttons of a turn do, by their data-action.
const ACTIONS = {
  replay: openReplay,
  copy: ({ text }, pressed) => copyText(text, pressed),
  "copy-code": (_, pressed) => copyText(codeOf(pressed), pressed),
  download: (_, pressed) => {
    const href = URL.createObjectURL(new Blob([codeOf(pressed)]));
    h("a", { href, download: pressed.closest(".code").dataset.name }).click();
    setTimeout(() => URL.revokeObjectURL(href), 10_000);
  },
  preview: (_, pressed) => {
    const made = new DOMParser().parseFromString(codeOf(pressed), "text/html");
    const hint = $("script", made) && h("p.quiet", "Its scripts do not run here. To run them, download and open it.");
    for (const one of $$("base, link, meta, script", made)) one.remove(); // a refresh or a prefetch goes elsewhere
    const srcdoc = ISOLATED + made.documentElement.outerHTML;
    openDialog("Preview", "wide", hint, h("iframe", { sandbox: "", srcdoc, title: "Preview" }));
  },
  wrap: () => toggleLook("wrapped"),
  retry: (turn, pressed) => (turn.role === "user" ? replyAgain(turn, "/retry") : openRetryMenu(turn, pressed)),
  continue: (turn) => replyAgain(turn, "/continue"),
  edit: editTurn,
  race: (turn) => openRace({ turn }),
  earlier: (turn) => chooseVersion(turn, -1),
  later: (turn) => chooseVersion(turn, 1),
  more: openTurnMenu,
  figures: (turn) => {
    if (!unfolded.delete(turn.id)) unfolded.add(turn.id);
    showTurn(turn);
  },
  answer: ({ id }, { dataset }) => api("POST", `/turns/${id}/calls/${dataset.n}`, { answer: dataset.answer }),
  file: async ({ id }, { dataset }) => {
    const { name, text } = await api("GET", `/turns/${id}/files/${dataset.n}`);
    openDialog(name, "wide", h("pre.file", { tabindex: 0, dir: "auto" }, text));
  },
};

const codeOf = (pressed) => $("code", pressed.closest(".code")).textContent;
// Of a preview, whose frame has another origin. The page's own policy holds there, too: no script, no other host.
// Scripts in such a frame could still send by WebRTC, which no policy keeps back in Chromium.
const POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:";
const ISOLATED = `<!doctype html><meta http-equiv="Content-Security-Policy" content="${POLICY}">`;

const openRetryMenu = (turn, anchor) =>
  openMenu(anchor, [
    ["Again", () => replyAgain(turn, "/retry")],
    ["With another model…", () => openModels(replyAgain.bind(null, turn, "/retry", {}, settings))],
    ["Plain, without drafts", () => replyAgain(turn, "/retry", { how: "plain" })],
    ["More freely", () => replyAgain(turn, "/retry", { how: "freer" })],
    ["Less freely", () => replyAgain(turn, "/retry", { how: "stricter" })],
  ]);

function replyAgain({ id }, path, more = {}, given = settings) {
  const error = $(`#turn-${id} .error`); // if the reply begins, it gets another one
  const ask = () => api("POST", `/turns/${id}${path}`, { settings: given, ...more });
  return tried(ask, () => error ?? $("#alert"))();
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
    isReply && [isFilled() ? "Underline what was drafted" : "Fill what was drafted", () => toggleLook("filled")],
    ["Delete this and what follows", tried(() => deleteTurn(turn))],
  ]);
}

const isFilled = () => $("#turns").classList.contains("filled");
const toggleLook = (name) => memory.set(name, $("#turns").classList.toggle(name));

async function deleteTurn(turn) {
  const n = turns.length - turns.indexOf(turn);
  await api("DELETE", `/turns/${turn.id}`);
  const undo = () => api("POST", `/turns/${turn.id}/restore`);
  notify(n === 1 ? "Deleted one turn" : `Deleted ${n} turns`, "Undo", undo);
}

// Shows a turn's form. A changed message is answered anew; a changed reply stands as it is.
export function editTurn(turn) {
  const { id, role, text } = turn;
  const article = $(`#turn-${id}`);
  if ($("form", article)) return $("textarea", article).focus();
  const isMessage = role === "user";
  const area = h("textarea", { dir: "auto", "aria-label": isMessage ? "Message" : "Reply" }, text);
  const error = h("p.error", { role: "alert", hidden: true });
  const onreset = () => {
    form.remove();
    showTurn(turn);
    setCurrent(article, true);
  };
  const save = async () => {
    await api("POST", `/turns/${id}/edit`, { text: area.value, settings });
    onreset();
  };
  const onsubmit = tried(save, () => error);
  const onkeydown = (event) => {
    if (event.key === "Escape") {
      event.stopPropagation();
      form.reset();
    } else if (event.key === "Enter" && isMessage && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      form.requestSubmit();
    }
  };
  const cancel = h("button", { type: "reset", class: "plain" }, "Cancel");
  const row = h("div.row", cancel, h("button.primary", isMessage ? "Send" : "Save"));
  const form = h("form", { onreset, onsubmit, onkeydown }, area, error, row);
  article.append(form);
  article.classList.add("edited");
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
// to turn. Tab also reaches what scrolls sideways.
function setCurrent(article, focuses = false) {
  for (const one of $$("#turns .turn :is(button, a, summary):not(form *)")) one.tabIndex = -1;
  for (const one of $$("#turns :is(pre, table)")) one.tabIndex = one.scrollWidth > one.clientWidth ? 0 : -1;
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
  const runs = target === article || target.matches(".drafted") ? $$(".drafted", article) : [];
  if (runs.length && (key === "Enter" || runs.includes(target)) && key in { Enter: 0, ...LEFT_RIGHT }) {
    focusRun(step(runs, key, LEFT_RIGHT) ?? runs[0]);
  } else if (article && key in LEFT_RIGHT) step(activeIn(article), key)?.focus();
  else if (turn) {
    setCurrent(turn, true);
    turn.scrollIntoView({ block: "nearest" });
  } else return;
  event.preventDefault();
}

function focusRun(run) {
  run.tabIndex = -1; // can be focused
  run.focus();
}

// Tells of the drafted run that the mouse is on, or that has the focus, and fills those of a turn at its figures.
function tellRun({ target, type }) {
  $(".turn.filled")?.classList.remove("filled");
  target.closest(".speed")?.parentElement.classList.add("filled");
  const run = target.closest(".drafted") ?? document.activeElement.closest(".drafted");
  const { n, from } = run?.dataset ?? {};
  const told = run ? `${n} ${n === "1" ? "token" : "tokens"} in one step${from ? `, ${from}` : ""}` : "";
  setText($("#tip"), told);
  if (run) showAt($("#tip"), run.getClientRects()[0]);
  if (run && type === "focusin") setText($("#said"), told);
}

// A running reply, by the stream

listeners.turn = ({ seq, chat: id, turn: n, part, from, same, blocks, sentence, set }) => {
  const turn = id === chat?.id && seq > shownTo && turns.find((one) => one.id === n);
  if (!turn) return;
  const article = $(`#turn-${n}`);
  const isAtEnd = nearEnd();
  if (set) {
    Object.assign(turn, set);
    showTurn(turn);
    if ("state" in set) setCurrent(article);
    const waits = turn.calls?.some((call) => call.state === "asked");
    const end = waits ? "A call of a tool waits for your answer" : "The reply is complete";
    if (set.state && set.state !== "running") setText($("#said"), set.error || end);
    showGauge();
    showComposer();
  } else {
    const name = part === "answer" ? "blocks" : part;
    const known = turn[name] ?? [];
    const begun = (known[from] ?? "").slice(0, same); // the first block begins as before
    turn[name] = [...known.slice(0, from), ...blocks.map((html, at) => (at ? html : begun + html))];
    $(".thoughts", article).hidden = !turn.reasoning?.length;
    turn.sentence = sentence;
    setText($(".sentence", article), sentence);
    $(".speed", article).hidden = !sentence;
    takeBlocks($(`.${part}`, article), from, turn[name].slice(from));
  }
  if (isAtEnd) scrollToEnd();
};

listeners.turns = tried(async (event) => {
  if (event.chat !== chat?.id || event.seq <= shownTo) return;
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
  const earlier = $("#earlier");
  earlier.onclick = tried(readEarlier);
  nearTop.observe(earlier);
  for (const name of ["filled", "wrapped"]) $("#turns").classList.toggle(name, memory.get(name) ?? false);
  box.addEventListener("click", (event) => {
    const pressed = event.target.closest("[data-action]");
    const run = event.target.closest(".drafted");
    if (pressed) tried(ACTIONS[pressed.dataset.action])(pressed.closest(".turn").turn, pressed);
    else if (run && getSelection().isCollapsed) focusRun(run);
  });
  box.addEventListener("focusin", (event) => {
    const article = event.target.closest(".turn");
    if (article) setCurrent(article);
    tellRun(event);
  });
  box.addEventListener("mouseover", tellRun);
  box.addEventListener("keydown", moveInTurns);
}
