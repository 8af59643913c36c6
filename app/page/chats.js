// The list of earlier chats, beside the window: searched, opened, renamed and deleted.

const ACTS = ["open", "rename", "remove"]; // what the buttons of a row do
const find = (act, name) =>
  [...document.querySelectorAll(`#chats [data-${act}]`)].find((b) => b.dataset[act] === name);

let listed = ""; // the rows as they are
function showChats() {
  const box = document.querySelector("#chats .chats");
  const ul = box?.querySelector("ul");
  if (!ul || ul.querySelector("input")) return; // a title is being written
  const when = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "short" });
  const all = chats();
  const words = wanted();
  const list = all
    .filter((chat) => holds(chat, words))
    .map(({ name, title, at }) => [name, title, when.format(at), name === own()]);
  box.querySelector(".none").hidden = all.length > 0;
  box.querySelector("[type=search]").hidden = !all.length;
  const found = box.querySelector(".found");
  const number = words.length ? `${list.length} of ${all.length}` : "";
  if (found.textContent !== number) found.textContent = number; // a screen reader is told of each
  box.querySelector("[type=checkbox]").checked = areKept();
  box.querySelector("[type=checkbox]").disabled = stored === null;
  // A row that is made anew has neither the focus nor the pointer that is just pressed on it.
  if (JSON.stringify(list) === listed && ul.children.length === list.length) return;
  listed = JSON.stringify(list);
  const focused = ul.contains(document.activeElement) ? document.activeElement.dataset : {};
  ul.replaceChildren(...list.map((chat) => row(...chat)));
  for (const act of ACTS) if (act in focused) find(act, focused[act])?.focus();
}

function row(name, title, date, isOwn) {
  const row = document.createElement("li");
  const [open, change, remove] = ACTS.map((act) => {
    const button = document.createElement("button");
    button.dataset[act] = name;
    return button;
  });
  open.textContent = title || "Without words";
  open.title = `${title}\n${date}`;
  open.dir = "auto";
  if (isOwn) open.ariaCurrent = "true";
  change.textContent = "✎";
  change.title = "Rename";
  change.ariaLabel = `Rename ${title}`;
  remove.textContent = "×";
  remove.title = "Delete";
  remove.ariaLabel = `Delete ${title}`;
  row.append(open, change, remove);
  return row;
}

// Searched are titles and all that was said, files included; each word is to be somewhere.
const inLower = (text) => text.normalize().toLocaleLowerCase();
const wanted = () => inLower(document.querySelector("#chats [type=search]").value).match(/\S+/g) ?? [];

const texts = new Map(); // by name: when the chat was kept, and what is in it
function holds({ name, title, at }, words) {
  if (!words.length) return true;
  if (texts.get(name)?.at !== at) texts.set(name, { at, text: textIn(name) });
  const { text } = texts.get(name);
  return words.every((word) => inLower(title).includes(word) || text.includes(word));
}

function textIn(name) {
  try {
    const turns = JSON.parse(stored.getItem(textKey(name)) ?? "[]");
    const parts = turns.flatMap(({ user, files, reply }) => [
      user,
      ...(files ?? []).flatMap((file) => [file.name, file.text]),
      (reply?.pieces ?? []).map(([piece]) => piece).join(""),
    ]);
    return inLower(parts.join("\n"));
  } catch (error) {
    console.warn(error); // it was kept by another program
    return "";
  }
}

// The title becomes a field. Enter, or leaving it, keeps what stands there; Escape does not.
function writeTitle(name) {
  const open = find("open", name);
  const { title } = chats().find((chat) => chat.name === name) ?? {};
  if (!open || title === undefined) return;
  const field = document.createElement("input");
  field.value = title;
  field.ariaLabel = "Title";
  field.dir = "auto";
  open.replaceWith(field);
  field.select();
  const close = (isKept) => {
    field.onblur = null; // it is left by being removed, too
    const hadFocus = document.activeElement === field;
    const given = asTitle(field.value);
    field.remove();
    try {
      if (isKept && given !== title) rename(name, given);
    } catch (error) {
      console.warn(error); // there is no room
    }
    listed = "";
    showChats();
    if (hadFocus) (find("rename", name) ?? document.querySelector("#chats [type=search]")).focus();
  };
  field.onblur = () => close(true);
  field.onkeydown = (event) => {
    const { key, isComposing } = event;
    if ((key !== "Enter" && key !== "Escape") || isComposing) return;
    event.preventDefault(); // or it would press the button that gets the focus
    close(key === "Enter");
  };
}

function deleteChat(button) {
  const { remove: name } = button.dataset;
  const row = button.closest("li");
  const { textContent: title } = row.querySelector("[data-open]");
  if (!confirm(`Delete the chat “${title}”?`)) return;
  const list = chats();
  forget(list, list.filter((chat) => chat.name === name));
  const beside = row.nextElementSibling ?? row.previousElementSibling;
  const other = beside?.querySelector("[data-remove]").dataset.remove;
  const isOwn = name === own();
  if (isOwn) ofTab.removeItem("chat");
  showChats();
  (find("remove", other) ?? document.querySelector("#chats [type=checkbox]"))?.focus();
  if (!isOwn) return;
  isDeleted = !isEmpty();
  document.querySelector("#new").click();
}

document.addEventListener("click", ({ target }) => {
  const button = target.closest("#chats button");
  if (button?.dataset.open) openChat(button.dataset.open);
  if (button?.dataset.rename) writeTitle(button.dataset.rename);
  if (button?.dataset.remove) deleteChat(button);
});
document.addEventListener("keydown", ({ key, target }) => {
  const row = key === "F2" && target.closest("#chats li");
  if (row) writeTitle(row.querySelector("[data-open]")?.dataset.open);
});
document.addEventListener("input", ({ target }) => {
  if (!target.matches("#chats [type=search]")) return;
  ofTab?.setItem("search", target.value); // opening a chat loads the page again
  showChats();
});

document.addEventListener("change", ({ target }) => {
  if (!target.matches("#chats [type=checkbox]")) return;
  const list = chats();
  const forgets = `Forget ${list.length === 1 ? "the chat" : `all ${list.length} chats`} kept so far?`;
  if (target.checked) stored.removeItem(SWITCH);
  else if (list.length && !confirm(forgets)) target.checked = true;
  else {
    forget(list, list);
    stored.setItem(SWITCH, "no");
  }
  showChats();
});

function beginList() {
  const search = document.querySelector("#chats [type=search]");
  if (!search) return;
  search.value = ofTab?.getItem("search") ?? "";
  showChats();
}
document.addEventListener("chats", beginList); // where they are to be shown there is room now
window.addEventListener("storage", showChats); // another tab kept some
beginList();
