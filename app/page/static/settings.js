// The settings of the open chat, the header that shows them, and the drawer at the right.
//
// Settings are JSON, kept with each chat: { method, parameters, sampling, max_tokens, system, thinking,
// leave_out }, as settings.py reads them. Gradio renders the drawer's fields from them (fields.py) and calls
// page.set when one changes.

const USUAL = { method: "auto" }; // what is not set has the server's defaults
const PLAIN = "ar"; // the method without drafts
let server = { methods: [], presets: [], status: {} }; // as GET page/state says
let settings = USUAL;

const nameOf = (method) => method.split(":")[0]; // without parameters, as --method may give them
const titleOf = (method) => server.methods.find(({ name }) => name === nameOf(method))?.title ?? method;

// Takes over a chat's settings, or those last used.
function useSettings(given) {
  settings = { ...USUAL, ...given };
  showHeader();
  showFields();
}

let settingsSaved = 0;
function changeSettings(changes, before = settings) {
  settings = { ...before, ...changes };
  if (!isFleeting()) memory.set("settings", settings);
  showHeader();
  clearTimeout(settingsSaved);
  if (!chat) return;
  const { id } = chat;
  settingsSaved = setTimeout(
    tried(() => api("PATCH", `/chats/${id}`, { settings })),
    500,
  );
}

// Gradio's fields call this. Empty fields take their defaults.
window.page = {
  set(name, value, usual) {
    const isUsual = value === usual || value === "" || value === null;
    const [kind, key] = name.split(".");
    const { [key]: _, ...others } = settings[kind] ?? {};
    if (!key) changeSettings({ [name]: isUsual ? usual : value });
    else changeSettings({ [kind]: isUsual ? others : { ...others, [key]: value } });
    shownFields = JSON.stringify(settings); // the fields show it already
  },
};

// The drawer

const drawer = () => $("#right");
const isOpen = (side) => side.classList.contains("open");
function toggle(side, opens = !isOpen(side)) {
  if (isOpen(side) !== opens) $(".toggle-button", side).click();
  for (const one of $$(`[aria-controls="${side.id}"]`)) one.ariaExpanded = String(opens);
}

let shownFields = ""; // what the fields were rendered from
function showFields() {
  if (!isOpen(drawer())) return;
  showPresets();
  const now = JSON.stringify(settings);
  if (now === shownFields) return;
  shownFields = now;
  document.dispatchEvent(new CustomEvent("fields", { detail: now }));
}

function openDrawer(shows) {
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
function focusInDrawer(part) {
  if (!part.isConnected || !isOpen(drawer())) return;
  part.focus();
  if (document.activeElement !== part) requestAnimationFrame(() => focusInDrawer(part));
}

function closeDrawer() {
  stopReplay();
  toggle(drawer(), false);
  drawer().opener?.focus();
}

const toggleSettings = () => (isOpen(drawer()) ? closeDrawer() : openDrawer("settings"));

function showPresets() {
  const select = $("#presets select");
  const chosen = select.value;
  const options = server.presets.map(({ id, name }) => h("option", { value: id }, name));
  select.replaceChildren(h("option", { value: "" }, "Choose a preset"), ...options);
  select.value = chosen;
  if (!select.value) select.value = ""; // it was deleted
}

function startPresets() {
  const chosen = () => server.presets.find(({ id }) => String(id) === $("#presets select").value);
  $("#presets select").onchange = () => {
    if (!chosen()) return;
    changeSettings(chosen().settings, USUAL);
    showFields();
  };
  $("#presets button").onclick = ({ currentTarget }) => {
    const one = chosen();
    openMenu(currentTarget, [
      ["Save these settings as a preset…", savePreset],
      one && [`Delete “${one.name}”`, tried(() => deletePreset(one))],
    ]);
  };
}

const savePreset = tried(async () => {
  const name = await askFor("Name of the preset");
  if (!name) return;
  const saved = await api("POST", "/presets", { name, settings });
  server.presets = [...server.presets.filter((one) => one.id !== saved.id && one.name !== name), saved];
  showPresets();
});

async function deletePreset({ id, name, settings }) {
  await api("DELETE", "/presets", { id });
  server.presets = server.presets.filter((one) => one.id !== id);
  showPresets();
  notify(`Deleted the preset “${name}”`, "Undo", async () => {
    server.presets.push(await api("POST", "/presets", { name, settings }));
    showPresets();
  });
}

// The header

function showHeader() {
  const { model, loading, error } = server.status ?? {};
  $("#model-name").textContent = model?.name ?? (loading ? "Loading a model" : "No model");
  $("#model").title = model ? `${model.name}: ${model.description}` : "Choose a model";
  setText($("#loading"), loading ? progressOf(loading) : "");
  setText($("#model-error"), error ?? "");
  document.body.classList.toggle("thinks", !!model?.has_thinking_switch);
  showMethods();
  showGauge();
  showStart();
}

// The methods. One that cannot run is grey and says why; if models.txt has what it needs, that is offered.
const NEEDS = {
  draft_model: "a draft model",
  heads: "drafting heads",
  model: "a model that is not recurrent",
  parameters: "smaller parameters here",
};
const missingFor = (name) => server.status?.model?.missing?.[name]; // { setting, offer }

function showMethods() {
  const select = $("#method");
  const now = h("select");
  for (const { name, title } of server.methods) {
    const { setting, offer = [] } = missingFor(name) ?? {};
    const needs = setting ? ` (needs ${NEEDS[setting]}${offer.length ? ": load…" : ""})` : "";
    const disabled = setting && setting !== "parameters" && !offer.length;
    now.append(h("option", { value: name, disabled }, title + needs));
  }
  const isSame = [...now.children].every((one, n) => one.isEqualNode(select.children[n]));
  if (!isSame || now.length !== select.length) select.replaceChildren(...now.children); // closes an open list
  select.value = nameOf(settings.method);
}

function chooseMethod(name) {
  if (missingFor(name)?.offer.length) {
    $("#method").value = nameOf(settings.method);
    return offerMissing(name, missingFor(name));
  }
  changeSettings({ method: name, parameters: {} });
  showFields();
}

function progressOf({ model, stage, done, total }) {
  if (stage === "measure") return `Measuring the speed of ${model}`;
  if (stage !== "download") return `Loading ${model}: ${done} %`;
  return `Downloading ${model}: ${inSize(done)} of ${inSize(total)}`;
}

function showGauge() {
  const max = server.status?.model?.n_ctx ?? 0;
  const value = turns.findLast((turn) => turn.n_context)?.n_context ?? 0;
  const title = `Context: ${value} of ${max} tokens`;
  Object.assign($("#gauge"), { hidden: !max, max, high: 0.9 * max, value, title, ariaValueText: title });
}

// Light and dark: as the system has it, until the user switches.
function useTheme(theme) {
  if (theme) document.body.classList.toggle("dark", theme === "dark");
}

function switchTheme() {
  const theme = document.body.classList.contains("dark") ? "light" : "dark";
  memory.set("theme", theme);
  useTheme(theme);
}
