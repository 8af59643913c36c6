// Elements, icons, menus, dialogs and notices. The server joins the files of this folder into one script
// (ui.py), so they share their names; start.js comes last and starts the page.

const $ = (selector, within = document) => within.querySelector(selector);
const $$ = (selector, within = document) => [...within.querySelectorAll(selector)];

// h("a", { href: "#", onclick }, "text") makes an element. Attributes that are false or null are left out.
function h(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made[name] = value;
    else if (value !== false && value != null) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child != null && child !== false));
  return made;
}

// HTML from the server, whose text is escaped there.
function fromHtml(html) {
  const template = document.createElement("template");
  template.innerHTML = html;
  return template.content;
}

// Screen readers announce every assignment, so only changes are assigned.
function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
  element.hidden = !text;
}

const ICONS = {
  menu: "M4 7h16M4 12h16M4 17h16",
  plus: "M12 5v14M5 12h14",
  gear: "M4 7h9m4 0h3M4 17h3m4 0h9M15 5v4M9 15v4",
  send: "M12 19V6m-6 6 6-6 6 6",
  stop: "M8 8h8v8H8z",
  clip: "m20 11-8 8a5 5 0 0 1-7-7l8-8a3.5 3.5 0 0 1 5 5l-8 8a1.5 1.5 0 0 1-2-2l7-7",
  copy: "M9 9h10v11H9zM5 15V4h10",
  check: "m5 13 4 4L19 7",
  edit: "M4 20h4L19 9l-4-4L4 16zM13 7l4 4",
  retry: "M19 12a7 7 0 1 1-2-5m2-3v4h-4",
  replay: "M4 18v-4m4 4V8m4 10v-7m4 7V5m4 13v-6",
  race: "M5 21V4m0 1c5-3 9 3 14 0v9c-5 3-9-3-14 0",
  more: "M4 12a1 1 0 0 0 2 0 1 1 0 0 0-2 0m7 0a1 1 0 0 0 2 0 1 1 0 0 0-2 0m7 0a1 1 0 0 0 2 0 1 1 0 0 0-2 0",
  close: "m6 6 12 12M18 6 6 18",
  left: "m14 6-6 6 6 6",
  right: "m10 6 6 6-6 6",
  down: "M12 5v13m-6-6 6 6 6-6",
  play: "M8 5v14l11-7z",
  pause: "M8 5v14M16 5v14",
  theme: "M12 3a9 9 0 1 0 0 18zM12 3a9 9 0 0 1 0 18",
  hide: "M3 12s3-6 9-6 9 6 9 6-3 6-9 6-9-6-9-6zM4 4l16 16",
  pin: "M9 4h6l-1 7 3 3H7l3-3zM12 14v6",
  help: "M9 9a3 3 0 1 1 4 3c-1 .5-1 1-1 2m0 3h.01",
};

function icon(name) {
  const made = fromHtml(`<svg viewBox="0 0 24 24" aria-hidden="true"><path d="${ICONS[name]}"/></svg>`);
  return made.firstChild;
}

const button = (content, onclick, attributes) =>
  h("button", { type: "button", onclick, ...attributes }, ...[content].flat());

// A button with an icon; its label is for screen readers and shown on hover.
const iconButton = (name, label, onclick, attributes) =>
  button(icon(name), onclick, { class: "icon", "aria-label": label, title: label, ...attributes });

// Of a group's elements, Tab reaches one; the arrow keys move between them.
function roving(items, current, focuses = false) {
  for (const item of items) item.tabIndex = item === current ? 0 : -1;
  if (focuses) current?.focus();
}

const BACK = ["ArrowUp", "ArrowLeft"];
const ON = ["ArrowDown", "ArrowRight"];
function step(items, key, [back, on] = [BACK, ON]) {
  const at = items.findIndex((item) => item.contains(document.activeElement));
  if (key === "Home") return items[0];
  if (key === "End") return items.at(-1);
  if (!back.includes(key) && !on.includes(key)) return undefined;
  return items[Math.min(Math.max(at + (on.includes(key) ? 1 : -1), 0), items.length - 1)];
}

const ACTIVE = "button:not(:disabled), a, summary";
function makeGroup(element) {
  const items = () => $$(ACTIVE, element);
  roving(items(), items()[0]);
  element.onkeydown = (event) => {
    const next = step(items(), event.key);
    if (!next) return;
    event.preventDefault();
    roving(items(), next, true);
  };
}

// Shows a menu at a button: [label, action] each.
function openMenu(anchor, choices) {
  const box = h("div", { class: "menu", role: "menu", popover: "auto", "aria-label": anchor.ariaLabel });
  const choose = (action) => () => {
    box.hidePopover();
    action();
  };
  for (const [label, action] of choices.filter(Boolean)) {
    box.append(button(label, choose(action), { role: "menuitem" }));
  }
  box.onkeydown = (event) => {
    const next = step([...box.children], event.key);
    if (event.key === "Tab") box.hidePopover();
    if (!next) return;
    event.preventDefault();
    next.focus();
  };
  box.ontoggle = ({ newState }) => {
    if (newState !== "closed") return;
    anchor.ariaExpanded = "false";
    if (box.contains(document.activeElement) || document.activeElement === document.body) anchor.focus();
    box.remove();
  };
  $("#main").append(box);
  box.showPopover();
  const { left, right, bottom, top } = anchor.getBoundingClientRect();
  const [width, height] = [box.offsetWidth, box.offsetHeight];
  box.style.left = `${Math.max(8, Math.min(left, innerWidth - width - 8, right))}px`;
  box.style.top = `${bottom + height + 8 > innerHeight ? Math.max(8, top - height - 4) : bottom + 4}px`;
  anchor.ariaExpanded = "true";
  box.firstChild.focus();
}

// A modal dialog with a heading; it ends with Escape, its cross, or close().
function openDialog(title, ...content) {
  const cross = iconButton("close", "Close", () => dialog.close());
  const dialog = h("dialog", { "aria-label": title }, h("header", {}, h("h2", {}, title), cross), ...content);
  dialog.onclose = () => dialog.remove();
  $("#main").append(dialog);
  dialog.showModal();
  return dialog;
}

// Asks for a line of text; undefined if the user leaves it.
function askFor(title, value = "") {
  return new Promise((resolve) => {
    const field = h("input", { value, "aria-label": title, dir: "auto", maxlength: 80 });
    const form = h("form", {}, field, h("button", { class: "primary" }, "Save"));
    const dialog = openDialog(title, form);
    form.onsubmit = (event) => {
      event.preventDefault();
      resolve(field.value.trim());
      dialog.close();
    };
    dialog.addEventListener("close", () => resolve(undefined));
    field.select();
  });
}

// A line at the bottom for a while, with an action such as Undo.
let noticeEnds = 0;
function notify(text, label, action) {
  const box = $("#notice");
  clearTimeout(noticeEnds);
  const act = () => {
    box.replaceChildren();
    tried(action)();
  };
  box.replaceChildren(...(text ? [h("span", {}, text)] : []), ...(label ? [button(label, act)] : []));
  if (text) noticeEnds = setTimeout(() => box.matches(":hover, :focus-within") || notify(""), 10_000);
}

// Wraps an action: an error it raises is shown at its place, until a later action there succeeds.
function tried(action, place = () => $("#alert")) {
  return async (...given) => {
    try {
      const result = await action(...given);
      setText(place(), "");
      return result;
    } catch (error) {
      console.warn(error);
      setText(place(), error.message);
    }
  };
}

// Browsers have a clipboard for pages of this machine and of https alone.
function toClipboard(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = h("textarea");
  area.value = text;
  $("#main").append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

function download(blob, name) {
  const link = h("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

// What this browser remembers: settings of the page, unsent messages. It may be set to store nothing.
const memory = {
  get(key) {
    try {
      return JSON.parse(localStorage.getItem(`speculation:${key}`));
    } catch {
      return null;
    }
  },
  set(key, value) {
    try {
      if (value == null) localStorage.removeItem(`speculation:${key}`);
      else localStorage.setItem(`speculation:${key}`, JSON.stringify(value));
    } catch (error) {
      console.warn(error); // it is full, or stores nothing
    }
  },
};
