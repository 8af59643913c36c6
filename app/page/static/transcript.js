// The transcript: shows the turns it is given, one HTML string each, and renews only those that
// changed. The files of this folder run together, as js_on_load of the HTML component.

const shown = [];
let follows = true; // the text as it grows, until the user scrolls up
let scrolled = 0; // how far, when it was looked at last

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
    if (before) become(before, turn);
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

// A screen reader is told when a reply begins and when it is there, not of every word in between;
// and when the model begins to read at another turn.
let wasBusy = false;
let wasFrom;
function announce(busy, from) {
  const moved = busy && from !== undefined && from !== wasFrom;
  wasFrom = from;
  if (busy === wasBusy && !moved) return;
  wasBusy = busy;
  const status = element.querySelector("[role=status].unseen");
  const reading = moved ? "; it no longer reads the oldest turns" : "";
  if (status) status.textContent = busy ? `The model is replying${reading}` : "The reply is there";
}

// Let a node become like another by as few changes as need be: what is selected, unfolded, pressed or
// has the focus in it stays so.
function become(node, other) {
  if (node.nodeType === Node.TEXT_NODE) {
    if (other.data.startsWith(node.data)) node.appendData(other.data.slice(node.data.length));
    else node.data = other.data;
    return;
  }
  const { keeps } = node.dataset;
  if (keeps !== undefined && keeps === other.dataset.keeps) return; // it was filled here
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
    else if (before.nodeName === part.nodeName) become(before, part);
    else if (node.childNodes.length < parts.length) before.before(part);
    else before.replaceWith(part);
  });
  while (node.childNodes.length > parts.length) node.lastChild.remove();
}

element.addEventListener(
  "scroll",
  (event) => event.target.classList.contains("turns") && noticeScroll(event.target),
  true, // scrolling does not bubble
);

// What a run of drafts is, told when it is pointed at, while drafts are coloured.
element.addEventListener("mouseover", (event) => {
  const run = event.target.closest("[data-n]");
  if (!run) return;
  const { n } = run.dataset;
  const told = `${n} drafted token${n === "1" ? "" : "s"} accepted in one step`;
  if (document.querySelector("#colour input")?.checked) run.title = told;
  else run.removeAttribute("title");
});
