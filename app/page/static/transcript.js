// The transcript: shows turns, one HTML string each, and updates only those that changed. It runs with
// the other scripts as js_on_load of the HTML component (SCRIPTS in ui.py).

const shown = [];
let follows = true; // scroll with the growing text, until the user scrolls up
let scrolled = 0; // the last known scroll position

function noticeScroll(box) {
  if (box.scrollTop < scrolled) follows = false;
  const below = box.scrollHeight - box.scrollTop - box.clientHeight;
  if (below < (box.scrollTop > scrolled ? 60 : 2)) follows = true;
  scrolled = box.scrollTop;
}

function show() {
  const box = element.querySelector(".turns");
  if (!box) return;
  const turns = props.value || [];
  noticeScroll(box);
  const grew = turns.length > box.children.length;
  if (box.children.length < shown.length) shown.length = box.children.length;
  while (box.children.length > turns.length) {
    box.lastElementChild.remove();
    shown.pop();
  }
  turns.forEach((html, index) => {
    const before = box.children[index];
    if (shown[index] === html || before?.querySelector("form")) return;
    const turn = document.createElement("div");
    turn.innerHTML = html;
    turn.dataset.index = index;
    if (before) morph(before, turn);
    else box.append(turn);
    shown[index] = html;
  });
  if (turns.length) reopenEdits();
  element.querySelector(".welcome")?.toggleAttribute("hidden", turns.length > 0);
  const from = box.querySelector(".left-out")?.parentElement.dataset.index;
  announce(box.querySelector(".live") !== null, from);
  if (follows || grew) box.scrollTop = box.scrollHeight;
  scrolled = box.scrollTop;
}

// Screen readers announce when a reply starts and ends, and when more turns drop out of the context,
// but not every word.
let wasBusy = false;
let wasFrom;
function announce(busy, from) {
  const moved = busy && from !== undefined && from !== wasFrom;
  wasFrom = from;
  if (busy === wasBusy && !moved) return;
  wasBusy = busy;
  const status = element.querySelector("[role=status].unseen");
  const reading = moved ? "; it no longer reads the oldest turns" : "";
  if (status) status.textContent = busy ? `The model is replying${reading}` : "The reply is complete";
}

// Changes a node into another with as few changes as possible, to keep selection, focus and opened
// elements.
function morph(node, other) {
  if (node.nodeType === Node.TEXT_NODE) {
    if (other.data.startsWith(node.data)) node.appendData(other.data.slice(node.data.length));
    else node.data = other.data;
    return;
  }
  const { content } = node.dataset;
  if (content !== undefined && content === other.dataset.content) return; // filled by unfold
  for (const { name, value } of other.attributes) {
    if (node.getAttribute(name) !== value) node.setAttribute(name, value);
  }
  for (const { name } of [...node.attributes]) {
    if (!other.hasAttribute(name) && name !== "open") node.removeAttribute(name);
  }
  const parts = [...other.childNodes];
  parts.forEach((part, i) => {
    const goes = () => node.childNodes.length > parts.length;
    while (goes() && node.childNodes[i].nodeName !== part.nodeName) node.childNodes[i].remove();
    const before = node.childNodes[i];
    if (!before) node.append(part);
    else if (before.nodeName === part.nodeName) morph(before, part);
    else if (node.childNodes.length < parts.length) before.before(part);
    else before.replaceWith(part);
  });
  while (node.childNodes.length > parts.length) node.lastChild.remove();
}

element.addEventListener(
  "scroll",
  (event) => event.target.classList.contains("turns") && noticeScroll(event.target),
  true, // scroll does not bubble
);

// Pointing at a run of drafted tokens shows their number, if drafts are coloured.
element.addEventListener("mouseover", (event) => {
  const run = event.target.closest("[data-n]");
  if (!run) return;
  const { n } = run.dataset;
  const told = `${n} drafted token${n === "1" ? "" : "s"} accepted in one step`;
  if (document.querySelector("#colour input")?.checked) run.title = told;
  else run.removeAttribute("title");
});
