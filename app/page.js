// The transcript: shows the turns it is given, one HTML string each, and renews only those that
// changed; tells the server about retry, undo and edit. Runs as js_on_load of the HTML component.

const shown = [];

function show() {
  const box = element.querySelector(".turns");
  if (!box) return;
  const turns = props.value || [];
  const follows = box.scrollHeight - box.scrollTop - box.clientHeight < 60;
  const grew = turns.length > box.children.length;
  if (box.children.length < shown.length) shown.length = box.children.length;
  while (box.children.length > turns.length) {
    box.lastElementChild.remove();
    shown.pop();
  }
  turns.forEach((html, index) => {
    if (shown[index] === html) return;
    const turn = document.createElement("div");
    turn.innerHTML = html;
    turn.dataset.index = index;
    if (index < box.children.length) box.children[index].replaceWith(turn);
    else box.append(turn);
    shown[index] = html;
  });
  element.querySelector(".welcome")?.toggleAttribute("hidden", turns.length > 0);
  if (follows || grew) box.scrollTop = box.scrollHeight;
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
  };
  form.querySelector("[data-action=cancel]").addEventListener("click", close);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const text = area.value.trim();
    if (!text) return;
    trigger("edit", { index: Number(turn.dataset.index), text });
    close();
  });
  area.addEventListener("keydown", (event) => {
    if (event.key === "Escape") close();
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      form.requestSubmit();
    }
  });
}

async function copy(turn, button) {
  const text = turn.querySelector(".text");
  if (!text) return;
  await navigator.clipboard.writeText(text.dataset.source ?? text.textContent);
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
  if (button.dataset.action === "retry") trigger("retry", { index });
  if (button.dataset.action === "undo") trigger("undo", { index });
});

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
