// Elements, icons, menus, dialogs and notices.

import morph from "./morphdom.js"; // 2.7.8, as npm has it; its licence is in morphdom-LICENSE.txt

export const $ = (selector, within = document) => within.querySelector(selector);
export const $$ = (selector, within = document) => [...within.querySelectorAll(selector)];

// h("a.plain", { href: "#", onclick }, "text") makes an element with a class; attributes may be left out, and those
// that are false or null are, and children that are nothing.
export const h = (...given) => filled("http://www.w3.org/1999/xhtml", ...given);
export const svg = (...given) => filled("http://www.w3.org/2000/svg", ...given);
function filled(namespace, tag, ...given) {
  const [name, ...classes] = tag.split(".");
  const attributes = given[0]?.constructor === Object ? given.shift() : {};
  const made = Object.assign(document.createElementNS(namespace, name), { handlers: {} });
  if (classes.length) made.setAttribute("class", classes.join(" "));
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.handlers[name] = value;
    else if (value !== false && value != null) made.setAttribute(name, value === true ? "" : value);
  }
  Object.assign(made, made.handlers).append(...given.filter(Boolean));
  return made;
}

// Makes an element like another one, or gives it these children. What stays, known by its id or else its place,
// keeps focus, selection, scroll position and what is open.
export const render = (box, ...children) => change(box, h(box.localName, ...children), { childrenOnly: true });
export function change(old, now, options) {
  const focused = document.activeElement;
  morph(old, now, { onBeforeElUpdated: takeOver, ...options });
  if (old.contains(focused)) focused.focus({ preventScroll: true }); // it may have been moved
}

// Takes over what is no attribute, or is the user's. Returns whether there is more to change.
function takeOver(old, now) {
  for (const name in { ...old.handlers, ...now.handlers }) old[name] = now[name];
  old.handlers = now.handlers;
  if (old.hasAttribute("tabindex")) now.tabIndex = old.tabIndex;
  if (old.open) now.open = true;
  return (now.handlers && now.tagName !== "SELECT") || !old.isEqualNode(now);
}

// A list to choose from: [value, label, whether it is disabled] each.
export const selectOf = (attributes, choices, chosen) => setChoices(h("select", attributes), choices, chosen);
export function setChoices(select, choices, chosen) {
  const optionOf = ([value, label = value, disabled]) =>
    h("option", { value, disabled, selected: value === chosen }, label);
  render(select, ...choices.map(optionOf));
  select.value = chosen;
  return select;
}

// The HTML of a block of Markdown, whose text the server has escaped. Nothing else becomes HTML.
export function fromHtml(html) {
  const template = document.createElement("template");
  template.innerHTML = html;
  return template.content;
}

// Screen readers announce every assignment, so only changes are assigned.
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
  element.hidden = !text;
}

export const plain = (label, onclick, attributes) => button(label, onclick, { class: "plain", ...attributes });

// An icon of main.html.
export const icon = (name) => svg("svg", { "aria-hidden": "true" }, svg("use", { href: `#icon-${name}` }));

export const button = (content, onclick, attributes) =>
  h("button", { type: "button", onclick, ...attributes }, ...[content].flat());

// A button with an icon; its label is for screen readers and shown on hover.
export const iconButton = (name, label, onclick, attributes) =>
  button(icon(name), onclick, { class: "icon", "aria-label": label, title: label, ...attributes });

// Of a group's elements, Tab reaches one; the arrow keys move between them.
export function roving(items, current, focuses = false) {
  for (const item of items) item.tabIndex = item === current ? 0 : -1;
  if (focuses) current?.focus();
}

export const UP_DOWN = { ArrowUp: -1, ArrowDown: 1 };
export const LEFT_RIGHT = { ArrowLeft: -1, ArrowRight: 1 };
export function step(items, key, by = { ...UP_DOWN, ...LEFT_RIGHT }) {
  const at = items.findIndex((item) => item.contains(document.activeElement));
  if (key === "Home") return items[0];
  if (key === "End") return items.at(-1);
  return key in by ? (items[Math.max(at + by[key], 0)] ?? items.at(-1)) : undefined;
}

export const activeIn = (element) =>
  $$(":is(button:enabled, a, summary):not(form *)", element).filter((one) => one.checkVisibility());
export function makeGroup(element) {
  roving(activeIn(element), activeIn(element)[0]);
  element.addEventListener("keydown", (event) => {
    const items = activeIn(element);
    const next = step(items, event.key);
    if (!next) return;
    event.preventDefault();
    roving(items, next, true);
  });
}

// Shows a menu at a button: [label, action] each.
export function openMenu(anchor, choices) {
  const box = h("div.menu", { role: "menu", popover: "auto", "aria-label": anchor.ariaLabel });
  const choose = (action) => () => {
    box.hidePopover();
    action();
  };
  for (const [label, action] of choices.filter(Boolean)) {
    box.append(button(label, choose(action), { role: "menuitem" }));
  }
  box.onkeydown = ({ key }) => {
    if (key === "Tab") box.hidePopover();
  };
  box.ontoggle = ({ newState }) => {
    if (newState !== "closed") return;
    anchor.ariaExpanded = "false";
    if (box.contains(document.activeElement) || document.activeElement === document.body) anchor.focus();
    box.remove();
  };
  $("#main").append(box);
  showAt(box, anchor.getBoundingClientRect());
  makeGroup(box);
  anchor.ariaExpanded = "true";
  box.firstChild.focus();
}

// Shows a popover below a place, or above it where there is more room.
export function showAt(box, { left, right, bottom, top }) {
  box.showPopover();
  const [width, height] = [box.offsetWidth, box.offsetHeight];
  box.style.left = `${Math.max(8, Math.min(left, innerWidth - width - 8, right))}px`;
  box.style.top = `${bottom + height + 8 > innerHeight ? Math.max(8, top - height - 4) : bottom + 4}px`;
}

// A modal dialog with a heading and a place for errors; it ends with Escape, its cross, or close().
export function openDialog(title, kind, ...content) {
  const cross = iconButton("close", "Close", () => dialog.close());
  const heading = h("header", h("h2", title), cross);
  const error = h("p.error", { role: "alert", hidden: true });
  const dialog = h("dialog", { "aria-label": title, class: kind }, heading, error, ...content);
  dialog.onclose = () => dialog.remove();
  $("#main").append(dialog);
  dialog.showModal();
  return dialog;
}

// The value of the button that ends a form in a dialog; "" if the user leaves it.
async function answerTo(title, ...content) {
  const dialog = openDialog(title, "", h("form", { method: "dialog" }, ...content));
  await new Promise((closed) => dialog.addEventListener("close", closed));
  return dialog.returnValue;
}

// Asks for a line of text; undefined if the user leaves it.
export async function askFor(title, value = "") {
  const field = h("input", { value, "aria-label": title, dir: "auto", maxlength: 80 });
  const answer = answerTo(title, field, h("button.primary", { value: "save" }, "Save"));
  field.select();
  return (await answer) ? field.value.trim() : undefined;
}

export async function askWhether(question, text, yes, no) {
  const answers = [h("button.primary", { value: "yes" }, yes), h("button.plain", no)];
  return (await answerTo(question, h("p", text), ...answers)) === "yes";
}

// Asks for files of this machine; the browser shows its own dialog.
export function chooseFiles(attributes, take) {
  const input = h("input", { type: "file", ...attributes });
  input.onchange = () => take(input.files);
  input.click();
}

// A line at the bottom for a while, with an action such as Undo.
let noticeEnds = 0;
export function notify(text, label, action) {
  const box = $("#notice");
  clearTimeout(noticeEnds);
  const act = () => {
    notify("");
    tried(action)();
  };
  box.replaceChildren(...(text ? [h("span", text)] : []), ...(label ? [button(label, act)] : []));
  box.togglePopover(!!text); // above the list of chats on a phone, and above dialogs
  if (text) noticeEnds = setTimeout(() => box.matches(":hover, :focus-within") || notify(""), 10_000);
}

// Wraps an action: an error it raises is shown at its place, which is the open dialog if there is one, until a later
// action there succeeds.
const placeOfErrors = () => $$("dialog[open] > .error").at(-1) ?? $("#alert");
export function tried(action, place = placeOfErrors) {
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

export function inSize(bytes) {
  const units = { GB: 1e9, MB: 1e6, kB: 1e3, B: 1 };
  const [unit, one] = Object.entries(units).find(([, one]) => bytes >= 0.9995 * one) ?? ["B", 1];
  return `${(bytes / one).toFixed(one >= 1e6 && bytes < 100 * one ? 1 : 0)} ${unit}`;
}

export async function toClipboard(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Browsers have a clipboard for pages of this machine and of https alone, and may refuse it.
    const area = h("textarea", text);
    $("#main").append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
}

// What this browser remembers: settings of the page, unsent messages. It may be set to store nothing.
export const memory = {
  get(key) {
    try {
      return JSON.parse(localStorage.getItem(`speculation:${key}`));
    } catch {
      return null;
    }
  },
  set(key, value) {
    try {
      localStorage.setItem(`speculation:${key}`, JSON.stringify(value));
    } catch (error) {
      console.warn(error); // it is full, or stores nothing
    }
  },
};
