// The open chat: its turns, their actions, and replies as they grow.

let turns = []; // the active path, as TurnJson
let hasEarlier = false; // turns before these
const INCOGNITO = "Incognito: this chat is in memory alone and in no list. It ends with the server.";

async function openChat(id, turn = null) {
  const got = await api("GET", `/chats/${id}?limit=30`);
  keepDraft();
  chat = got.chat;
  useSettings(chat.settings);
  takeTurns(got);
  restoreDraft();
  if (turn) await goTo(turn);
  else scrollToEnd();
}

function newChat() {
  keepDraft();
  chat = null;
  if (location.hash) history.pushState(null, "", here(""));
  useSettings(settings);
  takeTurns({ turns: [], has_earlier: false });
  restoreDraft();
  focusBox();
}

// The address tells which chat is open, so that links and the browser's Back work.
const followAddress = tried(async () => {
  const { chat: id, turn } = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  if (innerWidth <= 768) toggle($("#left"), false);
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
  const { turns: before, has_earlier } = await api("GET", `/chats/${chat.id}?before=${turns[0].id}&limit=30`);
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

function showTurns() {
  const box = $("#turns");
  const before = new Map($$(".turn", box).map((article) => [article.turn, article]));
  const articles = turns.map(
    (turn) => before.get(turn) ?? (turn.role === "user" ? messageOf(turn) : replyOf(turn)),
  );
  const parts = articles.flatMap((article) => {
    const n_ctx = article.turn.left_out_here;
    const text = `The model no longer reads the turns above: its context of ${n_ctx} tokens is full`;
    return n_ctx ? [h("p", { class: "left-out", role: "note" }, text), article] : [article];
  });
  const earlier = button("Earlier turns", tried(readEarlier), { class: "earlier" });
  box.replaceChildren(...(hasEarlier ? [earlier] : []), ...parts);
  setCurrent(articles.at(-1));
  showChats();
  setText($("#incognito-note"), (chat ? chat.incognito : isIncognito) ? INCOGNITO : "");
  $("#start").hidden = turns.length > 0;
  document.title = chat?.title ? `${chat.title} · Speculation` : "Speculation";
  showGauge();
  showComposer();
}

function replaceTurn(turn) {
  const article = $(`#turn-${turn.id}`);
  if (!article || $("form", article)) return; // it is being edited
  const made = turn.role === "user" ? messageOf(turn) : replyOf(turn);
  const hadFocus = article.contains(document.activeElement);
  article.replaceWith(made);
  setCurrent(made, hadFocus);
}

function articleOf(turn, name, ...parts) {
  const heading = h("h2", { class: "unseen" }, name);
  const article = h("article", { class: "turn", id: `turn-${turn.id}`, tabindex: -1 }, heading, ...parts);
  article.turn = turn;
  return article;
}

function messageOf(turn) {
  const files = turn.files.map(({ name, size }, n) => {
    const parts = [h("bdi", {}, name), h("span", {}, size)];
    return h(
      "li",
      {},
      button(
        parts,
        tried(() => showFile(turn, n)),
      ),
    );
  });
  const article = articleOf(
    turn,
    "You",
    files.length ? h("ul", { class: "files", "aria-label": "Attached files" }, ...files) : null,
    turn.text ? h("div", { class: "said", dir: "auto" }, turn.text) : null,
    actionBar(
      turn,
      iconButton("edit", "Edit", () => editTurn(turn)),
    ),
  );
  article.classList.add("user");
  return article;
}

async function showFile(turn, n) {
  const { name, text } = await api("GET", `/turns/${turn.id}/files/${n}`);
  openDialog(name, h("pre", { class: "file", tabindex: 0, dir: "auto" }, text)).classList.add("wide");
}

const INTERRUPTED = "The server ended while it wrote this reply. The text up to then is kept.";

function replyOf(turn) {
  const isRunning = turn.state === "running";
  const notice = turn.notice || (turn.state === "interrupted" ? INTERRUPTED : "");
  const seconds = Math.round(turn.seconds_thinking ?? 0);
  const thought =
    isRunning && !turn.blocks.length ? "Thinking" : seconds ? `Thought for ${seconds} s` : "Thoughts";
  const thoughts = h(
    "details",
    { class: "thoughts" },
    h("summary", {}, thought),
    part("reasoning", turn.reasoning),
  );
  thoughts.hidden = !turn.reasoning?.length;
  const act = (path) =>
    tried(
      () => api("POST", `/turns/${turn.id}${path}`, { settings }),
      () => $(".error", article),
    );
  const article = articleOf(
    turn,
    "Reply",
    thoughts,
    part("answer", turn.blocks),
    h("p", { class: "notice", role: "status", hidden: !notice }, notice),
    h("p", { class: "error", role: "alert", hidden: !turn.error }, turn.error ?? ""),
    speedOf(turn),
    isRunning
      ? null
      : actionBar(
          turn,
          turn.text && iconButton("copy", "Copy", (event) => copyText(turn.text, event.currentTarget)),
          iconButton("retry", "Retry", act("/retry")),
          iconButton("edit", "Edit", () => editTurn(turn)),
          turn.cells?.length && iconButton("replay", "Replay", () => openReplay(turn)),
          turn.text && iconButton("race", "Race", () => openRace({ turn })),
          turn.can_continue && button("Continue", act("/continue")),
        ),
  );
  article.classList.add("reply");
  article.classList.toggle("live", isRunning);
  if (isRunning) article.ariaBusy = "true";
  return article;
}

function part(name, blocks = []) {
  const box = h("div", { class: `markdown ${name}`, dir: "auto" });
  takeBlocks(box, 0, blocks);
  return box;
}

function takeBlocks(box, from, blocks) {
  while (box.children.length > from) box.lastChild.remove();
  for (const html of blocks) {
    const block = h("div", { class: "block", dir: "auto" });
    block.append(fromHtml(html));
    box.append(block);
  }
}

// One sentence on the speed, a bar with a cell for each step, and the figures behind ⋯.
function speedOf(turn) {
  if (!turn.sentence && !turn.cells?.length) return null;
  const facts = [["Method", turn.method], ["Model", turn.model], ...(turn.figures ?? [])].filter(
    ([, value]) => value,
  );
  const label = `Replay: ${turn.cells?.length ?? 0} steps`;
  const attributes = { class: "cells", "aria-label": label, title: label };
  const bar = turn.cells?.length ? button(cellsOf(turn.cells), () => openReplay(turn), attributes) : null;
  const rows = facts.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]);
  const figures = h("dl", { hidden: true }, ...rows);
  const more = iconButton("more", "Figures", () => {
    figures.hidden = !figures.hidden;
    more.ariaExpanded = String(!figures.hidden);
  });
  more.ariaExpanded = "false";
  return h(
    "div",
    { class: "speed" },
    bar,
    h("span", { class: "sentence" }, turn.sentence ?? ""),
    more,
    figures,
  );
}

// [ms, tokens] of each step as an SVG: width = time, height = tokens.
function cellsOf(cells) {
  const top = Math.max(4, ...cells.map(([, n]) => n));
  const paths = { plain: "", fast: "" };
  let at = 0;
  for (const [ms, n] of cells) {
    paths[n > 1 ? "fast" : "plain"] += `M${at} ${top}h${ms * 0.9}v${-n}h${-ms * 0.9}z`;
    at += ms;
  }
  const shapes = Object.entries(paths).map(([name, d]) => `<path class="${name}" d="${d}"/>`);
  const box = `viewBox="0 0 ${at || 1} ${top}" preserveAspectRatio="none" aria-hidden="true"`;
  return fromHtml(`<svg class="steps" ${box}>${shapes.join("")}</svg>`).firstChild;
}

function actionBar(turn, ...buttons) {
  const at = turn.siblings?.indexOf(turn.id) ?? 0;
  const n = turn.siblings?.length ?? 1;
  const go = (by) => tried(() => api("POST", `/turns/${turn.siblings[at + by]}/choose`));
  const siblings =
    n > 1 &&
    h(
      "span",
      { class: "siblings" },
      iconButton("left", "Earlier version", go(-1), { disabled: at === 0 }),
      h("span", {}, `${at + 1}/${n}`),
      iconButton("right", "Later version", go(1), { disabled: at === n - 1 }),
    );
  const more = iconButton("more", "More actions", () =>
    openMenu(more, [
      ["Duplicate the chat up to here", tried(() => duplicate(chat.id, turn.id))],
      ["Copy link", () => copyLink(`#chat=${chat.id}&turn=${turn.id}`)],
      turn.role === "user" && turn.text && ["Copy text", () => copyText(turn.text, more)],
      turn.role === "user" && ["Race with this prompt", () => openRace({ prompt: turn.text })],
      turn.role !== "user" && [
        isFilled() ? "Underline what was drafted" : "Fill what was drafted",
        fillDrafts,
      ],
      ["Delete this and what follows", tried(() => deleteTurn(turn))],
    ]),
  );
  more.ariaHasPopup = "menu";
  return h("div", { class: "actions" }, siblings, ...buttons.filter(Boolean), more);
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

// Replaces a turn's text by a form. A changed message is answered anew; a changed reply stands as it is.
function editTurn(turn) {
  const article = $(`#turn-${turn.id}`);
  if ($("form", article)) return;
  const isMessage = turn.role === "user";
  const area = h("textarea", { dir: "auto", "aria-label": isMessage ? "Message" : "Reply" });
  area.value = turn.text ?? "";
  const error = h("p", { class: "error", role: "alert", hidden: true });
  const end = () => {
    form.remove();
    article.classList.remove("editing");
    setCurrent(article, true);
  };
  const cancel = button("Cancel", end);
  const save = h("button", { class: "primary" }, isMessage ? "Send" : "Save");
  const form = h("form", {}, area, error, h("div", { class: "row" }, cancel, save));
  form.onsubmit = tried(
    async (event) => {
      event.preventDefault();
      await api("POST", `/turns/${turn.id}/edit`, { text: area.value, settings });
      end();
    },
    () => error,
  );
  form.onkeydown = (event) => {
    if (event.key === "Escape") {
      event.stopPropagation();
      end();
    } else if (event.key === "Enter" && isMessage && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      form.requestSubmit();
    }
  };
  article.classList.add("editing");
  article.append(form);
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
  for (const one of $$("#turns .turn")) {
    const items = $$(ACTIVE, one);
    const current = items.find((item) => item === document.activeElement) ?? items[0];
    roving(items, one === article ? current : null);
    for (const part of $$("pre, table", one)) part.tabIndex = one === article ? 0 : -1;
  }
  if (focuses) article?.focus({ preventScroll: true });
}

function moveInTurns(event) {
  const { key, target } = event;
  if (target.closest("form, pre, table")) return;
  const turn = step($$("#turns .turn"), key, [["ArrowUp"], ["ArrowDown"]]);
  const article = target.closest(".turn");
  const item = article && step($$(ACTIVE, article), key, [["ArrowLeft"], ["ArrowRight"]]);
  if (item && !["Home", "End"].includes(key)) item.focus();
  else if (turn) {
    setCurrent(turn, true);
    turn.scrollIntoView({ block: "nearest" });
  } else return;
  event.preventDefault();
}

// A running reply, by the stream

listeners.turn = ({ chat: id, turn: n, part: name, from, blocks, set }) => {
  const turn = id === chat?.id && turns.find((one) => one.id === n);
  if (!turn) return;
  const article = $(`#turn-${n}`);
  const isAtEnd = nearEnd();
  if (set) {
    const index = turns.indexOf(turn);
    turns[index] = { ...turn, ...set };
    if ("left_out_here" in set) showTurns();
    else if ("state" in set) replaceTurn(turns[index]);
    else takeSet(article, turns[index], set);
    if (set.state && set.state !== "running") setText($("#said"), set.error || "The reply is complete");
    showGauge();
    showComposer();
  } else {
    const key = name === "reasoning" ? "reasoning" : "blocks";
    turn[key] = [...(turn[key] ?? []).slice(0, from), ...blocks];
    if (name === "reasoning") $(".thoughts", article).hidden = false;
    takeBlocks($(`.${name}`, article), from, blocks);
  }
  if (isAtEnd) scrollToEnd();
};

function takeSet(article, turn, set) {
  article.turn = turn;
  if ("notice" in set) setText($(".notice", article), set.notice ?? "");
  if ("error" in set) setText($(".error", article), set.error ?? "");
}

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

function scrollToEnd() {
  const box = $("#transcript");
  box.scrollTop = box.scrollHeight;
  $("#to-end").hidden = true;
}

function startTranscript() {
  const box = $("#transcript");
  box.onscroll = () => ($("#to-end").hidden = nearEnd());
  new ResizeObserver(() => ($("#to-end").hidden = nearEnd())).observe($("#turns"));
  $("#to-end").onclick = scrollToEnd;
  $("#turns").classList.toggle("filled", memory.get("filled") ?? false);
  box.addEventListener("click", (event) => {
    const copy = event.target.closest("[data-action=copy-code]");
    if (copy) copyText($("code", copy.closest(".code")).textContent, copy);
    const link = event.target.closest("[data-note]");
    if (!link) return;
    event.preventDefault(); // the address is the chat's
    const ends = $$(`[data-note="${CSS.escape(link.dataset.note)}"]`, link.closest(".markdown"));
    ends.find(({ role }) => role !== link.role)?.focus();
  });
  box.addEventListener("focusin", ({ target }) => {
    const article = target.closest(".turn");
    if (article) setCurrent(article);
  });
  box.addEventListener("keydown", moveInTurns);
}
