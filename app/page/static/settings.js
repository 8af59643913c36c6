// The settings of the open chat, the header that shows them, and the drawer at the right.
//
// Settings are JSON, kept with each chat: { method, parameters, sampling, max_tokens, system, thinking,
// leave_out, tools }, as settings.py reads them. Gradio renders the drawer's fields from them (fields.py) and calls
// page.set when one changes.

import { $, $$, askFor, inSize, memory, notify, openMenu, setChoices, setText, tried } from "./dom.js";
import { AGAIN_MS, OFFLINE, api, goOnAfter } from "./api.js";
import { offerMissing } from "./models.js";
import { chat, turns } from "./transcript.js";
import { stopReplay } from "./replay.js";

const USUAL = { method: "auto" }; // what is not set has the server's defaults
// What new chats start with: what the user has said that they should, and --method.
export const usual = () => {
  const { method } = document.documentElement.dataset;
  return { ...memory.get("usual"), ...(method && { method }) };
};
export const PLAIN = "ar"; // the method without drafts
export let server = { methods: [], presets: [], status: {} }; // as GET page/state says
export let settings = USUAL;

export const nameOf = (method) => method.split(":")[0]; // without parameters, as --method may give them
export const titleOf = (method) => server.methods.find(({ name }) => name === nameOf(method))?.title ?? method;

// Takes over a chat's settings.
export function useSettings(given) {
  settings = { ...USUAL, ...given };
  showHeader();
  showFields();
}

let settingsSaved = 0;
export function changeSettings(changes, before = settings) {
  settings = { ...before, ...changes };
  showHeader();
  showSystem();
  clearTimeout(settingsSaved);
  if (!chat) return;
  const { id } = chat;
  settingsSaved = setTimeout(tried(() => api("PATCH", `/chats/${id}`, { settings })), 500);
}

// Gradio's fields call this. Empty fields take their defaults.
window.page = {
  set(name, value, usual) {
    const isUsual = value === usual || value === "" || value === null;
    const [kind, key] = name.split(".");
    const { [key]: _, ...others } = settings[kind] ?? {};
    if (!key) changeSettings({ [name]: isUsual ? usual : value });
    else changeSettings({ [kind]: isUsual ? others : { ...others, [key]: value } });
    shownFields = forFields(); // the fields show it already
    for (const one of $$("#fields [aria-invalid]")) one.ariaInvalid = null;
  },
};

// The system prompt, above the first turn.
export function showSystem() {
  const [summary, area] = $("#system").children;
  const { system = "" } = settings;
  $("#system").hidden = !$("#earlier").hidden || !(turns.length || system);
  setText(summary, system.trim() ? `System prompt: ${system}` : "No system prompt");
  if (document.activeElement !== area) area.value = system;
}

// The drawer

export const drawer = () => $("#right");
export const isOpen = (side) => side.classList.contains("open");
export function toggle(side, opens = !isOpen(side)) {
  if (isOpen(side) !== opens) $(".toggle-button", side).click();
  for (const one of $$(`[aria-controls="${side.id}"]`)) one.ariaExpanded = String(opens);
}

let shownFields = ""; // what the fields were rendered from
const forFields = () => JSON.stringify({ ...settings, load: server.status?.model?.load }); // its defaults differ
function showFields() {
  if (!isOpen(drawer())) return;
  showPresets();
  const now = forFields();
  if (now === shownFields) return;
  shownFields = now;
  document.dispatchEvent(new CustomEvent("fields", { detail: now }));
}

export function openDrawer(shows) {
  const side = drawer();
  if (shows !== "replay") stopReplay();
  if (!isOpen(side)) side.opener = document.activeElement;
  side.dataset.shows = shows;
  setText($("#drawer-title"), shows === "replay" ? "Replay" : "Settings");
  toggle(side, true);
  requestAnimationFrame(() => {
    if (shows === "settings") showFields(); // Gradio has opened it by now
    focusInDrawer($("#close-drawer"));
  });
}

// Focuses a part of the drawer, which is not yet visible in the frame in which it opens.
export function focusInDrawer(part) {
  if (!part.isConnected || !isOpen(drawer())) return;
  part.focus();
  if (document.activeElement !== part) requestAnimationFrame(() => focusInDrawer(part));
}

export function closeDrawer() {
  stopReplay();
  toggle(drawer(), false);
  drawer().opener?.focus();
}

// Marks the field of a setting that the server has refused.
document.addEventListener("refused", async ({ detail: name }) => {
  if (!/^(max_tokens$|sampling\.|parameters\.)/.test(name)) return; // it has none
  if (!isOpen(drawer())) openDrawer("settings");
  for (let n = 0; n < 50; n++) {
    await new Promise((done) => setTimeout(done, 100));
    const field = document.getElementById(`field-${name}`);
    if (field?.checkVisibility({ visibilityProperty: true })) {
      for (const one of $$("input, textarea", field)) one.ariaInvalid = "true";
      return field.scrollIntoView({ block: "center" });
    }
    for (const one of $$("#fields .gr-accordion > button:not(.open)")) one.click();
  }
});

export const toggleSettings = () => (isOpen(drawer()) ? closeDrawer() : openDrawer("settings"));

function showPresets() {
  const choices = server.presets.map(({ id, name }) => [String(id), name]);
  setChoices($("#presets select"), [["", "Choose a preset"], ...choices], String(chosenPreset()?.id ?? ""));
}

const chosenPreset = () => server.presets.find(({ id }) => String(id) === $("#presets select").value);

export function startSettings() {
  $("#system textarea").oninput = ({ target }) => {
    changeSettings({ system: target.value });
    showFields();
  };
  $("#presets select").onchange = () => {
    if (!chosenPreset()) return;
    changeSettings(chosenPreset().settings, USUAL);
    showFields();
  };
  $("#presets button").onclick = ({ currentTarget }) => {
    const one = chosenPreset();
    openMenu(currentTarget, [
      ["Save these settings as a preset…", savePreset],
      ["Start new chats with these settings", () => memory.set("usual", settings)],
      one && [`Delete “${one.name}”`, tried(() => deletePreset(one))],
    ]);
  };
}

const savePreset = tried(async () => {
  const name = await askFor("Name of the preset");
  if (name) await changePresets("POST", { name, settings });
});

async function deletePreset({ id, name, settings }) {
  await changePresets("DELETE", { id });
  notify(`Deleted the preset “${name}”`, "Undo", () => changePresets("POST", { name, settings }));
}

async function changePresets(method, change) {
  await api(method, "/presets", change);
  ({ presets: server.presets } = await api("GET", "/state"));
  showPresets();
}

// Asks until the server answers: it may just be starting again.
export async function readServer() {
  try {
    server = await api("GET", "/state");
  } catch (error) {
    console.warn(error);
    setText($("#offline"), error.cause ? OFFLINE : error.message);
    await new Promise((done) => setTimeout(done, AGAIN_MS));
    return readServer();
  }
  setText($("#offline"), "");
  goOnAfter(server.seq);
  for (const method of server.methods) if (method.name === PLAIN) method.title = "Plain decoding";
  if (server.notice) notify(server.notice);
  showHeader();
}

// The header

export function takeStatus(status) {
  server.status = status;
  showHeader();
  showFields();
}

function showHeader() {
  const { model, loading } = server.status ?? {};
  $("#model-name").textContent = model?.name ?? (loading ? "Loading a model" : "No model");
  const about = model && `${model.name}: ${model.facts}`;
  $("#model").title = about ?? "Choose a model";
  setText($("#loading"), loading ? progressOf(loading) : "");
  showModelError();
  document.body.classList.toggle("thinks", !!model?.has_thinking_switch);
  showMethods();
  showGauge();
  $("#tools").textContent = ["Tools", Object.keys(settings.tools ?? {}).join(", ")].filter(Boolean).join(": ");
  setText($("#about"), about ? [about, model.about].filter(Boolean).join(". ") : "No model is loaded yet.");
}

// An error of a load is told where it was asked for: in the tab and the chat, else, if the server was started
// with that model, where there is none.
const asked = new Map(); // the chats in which this tab asked for models, by the models' names
let dismissed = ""; // the error that the user has read
export const askedFor = (model) => asked.set(model, chat?.id);
export const loadError = (name) => (name === server.status?.failed ? unread() : "");
const unread = () => (server.status?.error === dismissed ? "" : (server.status?.error ?? ""));

function showModelError() {
  const { model, failed } = server.status ?? {};
  const isFirst = !model && failed === document.documentElement.dataset.model;
  const isOwn = asked.has(failed) && asked.get(failed) === chat?.id;
  const box = $("#model-error");
  setText($("span", box), !failed || isFirst || isOwn ? unread() : "");
  box.hidden = !$("span", box).textContent;
}

export function dismissError() {
  dismissed = server.status.error;
  showModelError();
}

// The methods. One that cannot run is grey and says why; if models.txt has what it needs, that is offered.
export const NEEDS = {
  draft_model: "a draft model",
  heads: "drafting heads",
  model: "a model that is not recurrent",
  parameters: "smaller parameters here",
};
export const missingFor = (name) => server.status?.model?.missing?.[name]; // { setting, offer }

function showMethods() {
  const choices = server.methods.map(({ name, title }) => {
    const { setting, offer = [] } = missingFor(name) ?? {};
    const needs = setting ? ` (needs ${NEEDS[setting]}${offer.length ? ": load…" : ""})` : "";
    return [name, title + needs, setting && setting !== "parameters" && !offer.length];
  });
  setChoices($("#method"), choices, nameOf(settings.method));
}

export function chooseMethod(name) {
  if (missingFor(name)?.offer.length) {
    $("#method").value = nameOf(settings.method);
    return offerMissing(name, missingFor(name));
  }
  changeSettings({ method: name, parameters: {} });
  showFields();
}

export function progressOf({ title, stage, done, total }) {
  if (stage !== "download") return done < total ? `Loading ${title}: ${done} %` : `Starting ${title}`;
  return `Downloading ${title}: ${inSize(done)} of ${inSize(total)}`;
}

export function showGauge() {
  const max = server.status?.model?.n_ctx ?? 0;
  const value = turns.findLast((turn) => turn.n_context)?.n_context ?? 0;
  const title = `Context: ${value} of ${max} tokens`;
  Object.assign($("#gauge"), { hidden: !max, max, high: 0.9 * max, value, title, ariaValueText: title });
}

// Light and dark: as the system has it, until the user switches.
export function useTheme(theme) {
  if (theme) document.body.classList.toggle("dark", theme === "dark");
}

export function switchTheme() {
  const theme = document.body.classList.contains("dark") ? "light" : "dark";
  memory.set("theme", theme);
  useTheme(theme);
}
