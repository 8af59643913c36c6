// The actions of a turn: edit, copy, retry, continue, undo.

// Opens the form that edits a turn; `before` is what an earlier form contained, if any.
function edit(turn, before) {
  const said = turn.querySelector(".said");
  const user = said.parentElement;
  const form = document.createElement("form");
  form.innerHTML =
    '<ul class="files" aria-label="Attached files"></ul>' +
    '<textarea aria-label="Your message" dir="auto"></textarea>' +
    '<div class="actions"><button type="submit">Send</button>' +
    '<button type="button" data-action="cancel">Cancel</button></div>';
  const area = form.querySelector("textarea");
  area.value = before?.text ?? said.textContent;
  user.classList.add("editing");
  user.append(form);
  showFiles(form, before?.files ?? turnOf(turn)?.files ?? []);
  area.style.height = Math.min(area.scrollHeight + 4, 300) + "px";
  if (!before) area.focus();
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
    if (!(text.trim() || filesOf(form).length) || isBusy() || !confirmDeletion(turn)) return;
    trigger("edit", { index: Number(turn.dataset.index), text, files: filesOf(form) });
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

// Edit and Retry delete all later turns.
function confirmDeletion(turn) {
  const after = element.querySelectorAll(".turns > *").length - 1 - Number(turn.dataset.index);
  if (!after) return true;
  const messages = after === 1 ? "the message" : `the ${after} messages`;
  return confirm(`This deletes ${messages} below. Continue?`);
}

// Browsers offer the clipboard API only to local and HTTPS pages; others get the old way.
async function writeClipboard(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = document.createElement("textarea");
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

async function copy(text, button) {
  await writeClipboard(text);
  button.focus();
  button.textContent = "Copied";
  setTimeout(() => (button.textContent = "Copy"), 1200);
}

element.addEventListener("click", (event) => {
  const button = event.target.closest("button[data-action]");
  const turn = event.target.closest("[data-index]");
  if (!button || !turn) return;
  const index = Number(turn.dataset.index);
  const text = turn.querySelector(".text");
  if (button.dataset.action === "copy" && text) copy(text.dataset.source ?? text.textContent, button);
  if (button.dataset.action === "copy-code") {
    const file = button.closest(".file");
    const code = button.closest(".code").querySelector("code");
    copy(file ? fileOf(file).text : code.textContent, button);
  }
  if (button.dataset.action === "edit") edit(turn);
  if (button.dataset.action === "retry" && confirmDeletion(turn)) {
    trigger("retry", { index });
    focusBox();
  }
  if (button.dataset.action === "continue") {
    trigger("continue_reply");
    focusBox();
  }
  if (button.dataset.action === "undo") {
    trigger("undo", { index });
    focusBox();
  }
});
