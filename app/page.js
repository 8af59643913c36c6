// The transcript: shows the turns it is given, one HTML string each, and renews only those that
// changed; tells the server about retry, undo and edit. Runs as js_on_load of the HTML component.

const shown = [];
let follows = true; // the text as it grows, until the user scrolls up
let top = 0;

function noticeScroll(box) {
  if (box.scrollTop < top) follows = false;
  const below = box.scrollHeight - box.scrollTop - box.clientHeight;
  if (below < (box.scrollTop > top ? 60 : 2)) follows = true;
  top = box.scrollTop;
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
  element.querySelector(".welcome")?.toggleAttribute("hidden", turns.length > 0);
  if (follows || grew) box.scrollTop = box.scrollHeight;
  top = box.scrollTop;
}

// Let a node become like another by as few changes as need be: what is selected, unfolded, pressed or
// has the focus in it stays so.
function become(node, other) {
  if (node.nodeType === Node.TEXT_NODE) {
    if (other.data.startsWith(node.data)) node.appendData(other.data.slice(node.data.length));
    else node.data = other.data;
    return;
  }
  for (const { name, value } of other.attributes) {
    if (node.getAttribute(name) !== value) node.setAttribute(name, value);
  }
  for (const { name } of [...node.attributes]) {
    if (!other.hasAttribute(name) && name !== "open") node.removeAttribute(name);
  }
  const parts = [...other.childNodes];
  parts.forEach((part, i) => {
    const before = node.childNodes[i];
    if (!before) node.append(part);
    else if (before.nodeName === part.nodeName) become(before, part);
    else before.replaceWith(part);
  });
  while (node.childNodes.length > parts.length) node.lastChild.remove();
}

function edit(turn) {
  const said = turn.querySelector(".said");
  const user = said.parentElement;
  const form = document.createElement("form");
  form.innerHTML =
    '<textarea aria-label="Your message"></textarea>' +
    '<div class="actions"><button type="submit">Send</button>' +
    '<button type="button" data-action="cancel">Cancel</button></div>';
  const area = form.querySelector("textarea");
  area.value = said.textContent;
  user.classList.add("editing");
  user.append(form);
  area.style.height = Math.min(area.scrollHeight + 4, 300) + "px";
  area.focus();
  const close = () => {
    user.classList.remove("editing");
    form.remove();
    show();
  };
  const cancel = () => {
    close();
    element.querySelector(`[data-index="${turn.dataset.index}"] [data-action=edit]`)?.focus();
  };
  form.querySelector("[data-action=cancel]").addEventListener("click", cancel);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const text = area.value.replace(/^\n+|\n+$/g, "");
    if (!text.trim() || isBusy() || !mayDrop(turn)) return;
    trigger("edit", { index: Number(turn.dataset.index), text });
    close();
    focusBox();
  });
  area.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !event.isComposing) cancel();
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      form.requestSubmit();
    }
  });
}

function isBusy() {
  return element.querySelector(".live") !== null;
}

// Saying something else, or having it said again, drops what came after.
function mayDrop(turn) {
  const after = element.querySelectorAll(".turns > *").length - 1 - Number(turn.dataset.index);
  if (!after) return true;
  return confirm(after === 1 ? "The turn after this one goes." : `The ${after} turns after go.`);
}

// A phone's keyboard is left where it is.
function focusBox() {
  if (matchMedia("(hover: hover)").matches) document.querySelector("#box textarea")?.focus();
}

// Without a clipboard of its own (a page that did not come from this machine) the old way.
async function write(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = document.createElement("textarea");
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

async function copy(turn, button) {
  const text = turn.querySelector(".text");
  if (!text) return;
  await write(text.dataset.source ?? text.textContent);
  button.focus();
  button.textContent = "Copied";
  setTimeout(() => (button.textContent = "Copy"), 1200);
}

element.addEventListener("click", (event) => {
  const button = event.target.closest("button[data-action]");
  const turn = event.target.closest("[data-index]");
  if (!button || !turn) return;
  const index = Number(turn.dataset.index);
  if (button.dataset.action === "copy") copy(turn, button);
  if (button.dataset.action === "edit") edit(turn);
  if (button.dataset.action === "retry" && mayDrop(turn)) {
    trigger("retry", { index });
    focusBox();
  }
  if (button.dataset.action === "continue") {
    trigger("go_on");
    focusBox();
  }
  if (button.dataset.action === "undo") {
    trigger("undo", { index });
    focusBox();
  }
});

// The message is what stands in the box now, not when Gradio gets round to it.
function noteSaid(event) {
  const box = document.querySelector("#box textarea");
  if (box && (event.key === "Enter" ? event.target === box : event.target.closest("#box button"))) {
    box.dataset.said = box.value;
  }
}
document.addEventListener("keydown", noteSaid, true);
document.addEventListener("click", noteSaid, true);

// What is typed is kept at once; with the server away, Gradio's own events would come too late.
document.addEventListener("input", (event) => {
  if (event.target.matches("#box textarea")) sessionStorage.setItem("typed", event.target.value);
});

element.addEventListener(
  "scroll",
  (event) => event.target.classList.contains("turns") && noticeScroll(event.target),
  true, // scrolling does not bubble
);

// Send and Stop take each other's place, and would take the focus along.
document.addEventListener("click", (event) => {
  if (event.target.closest("#box button")) focusBox();
});

// Another tab may have loaded another model meanwhile.
window.addEventListener("focus", () => trigger("focus"));

// On paper the conversation is as long as it is. Gradio keeps rules for media to what is below its
// own frame, so this one comes by another way.
const print = document.createElement("style");
print.textContent = `@media print {
  html, body, gradio-app, .gradio-container, .main, .sidebar-parent, main.contain, .contain > .column,
  #transcript, #transcript .html-container, #transcript .html-container > div, .turns {
    display: block !important; height: auto !important; min-height: 0 !important;
    overflow: visible !important; padding-left: 0 !important;
  }
  #settings, #box, #top button, .actions { display: none !important; }
}`;
document.head.append(print);

watch("value", show);
show();

// On a phone the settings cover the page, so they start closed. They open a moment after they are
// made, which is waited for.
if (matchMedia("(max-width: 768px)").matches) {
  const until = performance.now() + 3000;
  const close = () => {
    const button = document.querySelector("#settings.open .toggle-button");
    if (button) button.click();
    else if (performance.now() < until) requestAnimationFrame(close);
  };
  close();
}
