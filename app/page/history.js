// Earlier chats: the browser keeps them, under "chat:" and a name, and in "chats" a list of these with
// titles, the latest first. The tab knows which is its own.

const MOST_CHATS = 100;

function chats() {
  try {
    const found = JSON.parse(localStorage.getItem("chats") ?? "[]");
    return Array.isArray(found) ? found : [];
  } catch (error) {
    console.warn(error);
    return [];
  }
}

const areKept = () => localStorage.getItem("keeps-chats") !== "no";

function forget(list, unwanted) {
  for (const chat of unwanted) localStorage.removeItem(`chat:${chat.name}`);
  const left = list.filter((chat) => !unwanted.includes(chat));
  localStorage.setItem("chats", JSON.stringify(left));
  return left;
}

// Where there is no room the oldest make way.
function keepChat(text) {
  let name = sessionStorage.getItem("chat");
  if (!text || !areKept()) {
    sessionStorage.removeItem("chat"); // what is said next begins another
    return;
  }
  name ??= `${Date.now()}-${Math.random().toString(36).slice(2, 8)}`;
  sessionStorage.setItem("chat", name);
  const title = (JSON.parse(text)[0]?.user ?? "").trim().replace(/\s+/g, " ").slice(0, 80);
  let others = chats().filter((chat) => chat.name !== name);
  others = forget(others, others.slice(MOST_CHATS - 1));
  for (;;) {
    try {
      localStorage.setItem(`chat:${name}`, text);
      localStorage.setItem("chats", JSON.stringify([{ name, title, at: Date.now() }, ...others]));
      return;
    } catch (error) {
      if (!others.length) throw error;
      others = forget(others, others.slice(-1));
    }
  }
}

function showChats() {
  const box = document.querySelector("#chats .chats");
  if (!box) return;
  const own = sessionStorage.getItem("chat");
  const list = chats();
  const when = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "short" });
  box.querySelector("ul").replaceChildren(
    ...list.map(({ name, title, at }) => {
      const row = document.createElement("li");
      const open = document.createElement("button");
      open.textContent = title || "Without words";
      open.title = `${title}\n${when.format(at)}`;
      open.dir = "auto";
      open.dataset.open = name;
      if (name === own) open.ariaCurrent = "true";
      const remove = document.createElement("button");
      remove.textContent = "×";
      remove.title = "Delete";
      remove.ariaLabel = `Delete ${title}`;
      remove.dataset.remove = name;
      row.append(open, remove);
      return row;
    }),
  );
  box.querySelector(".none").hidden = list.length > 0;
  box.querySelector("input").checked = areKept();
}

function openChat(name) {
  const text = localStorage.getItem(`chat:${name}`);
  if (!text || name === sessionStorage.getItem("chat")) return;
  // What the page would still keep of the present one is there already, and the server reads the
  // other when the page is loaded.
  document.documentElement.dataset.leaving = "";
  sessionStorage.setItem("chat", name);
  sessionStorage.setItem("conversation", text);
  location.reload();
}

document.addEventListener("click", ({ target }) => {
  const { open, remove } = target.closest("#chats button")?.dataset ?? {};
  if (open) openChat(open);
  if (!remove) return;
  const list = chats();
  forget(list, list.filter((chat) => chat.name === remove));
  if (remove === sessionStorage.getItem("chat")) sessionStorage.removeItem("chat");
  const row = target.closest("li");
  const next = row.nextElementSibling ?? row.previousElementSibling;
  const name = next?.querySelector("[data-remove]").dataset.remove;
  showChats();
  document.querySelector(name ? `#chats [data-remove="${name}"]` : "#chats input")?.focus();
});

document.addEventListener("change", ({ target }) => {
  if (!target.matches("#chats input")) return;
  const list = chats();
  const forgets = `Forget ${list.length === 1 ? "the chat" : `all ${list.length} chats`} kept so far?`;
  if (target.checked) localStorage.removeItem("keeps-chats");
  else if (list.length && !confirm(forgets)) target.checked = true;
  else {
    forget(list, list);
    localStorage.setItem("keeps-chats", "no");
  }
  showChats();
});

document.addEventListener("kept", ({ detail }) => {
  try {
    keepChat(detail);
  } catch (error) {
    console.warn(error);
  }
  showChats();
});
document.addEventListener("chats", showChats); // where they are to be shown there is room now
window.addEventListener("storage", showChats); // another tab kept some
showChats();
