// The models: those on this machine, those that models.txt names, and any GGUF of the Hub.

import {
  $, $$, askWhether, button, h, inSize, notify, openDialog, plain, render, selectOf, setText, tried,
} from "./dom.js";
import { api, listeners } from "./api.js";
import { NEEDS, askedFor, changeSettings, dismissError, loadError, progressOf, server, titleOf } from "./settings.js";
import { openRace } from "./race.js";

let modelList = null; // as GET page/models says, while the dialog is open
let hubList = null; // as GET page/models/hub says
let openedModel = ""; // whose details are shown
let folder = null; // as GET page/models/browse says
let loadWith = { kv_type: "f16", exact: false }; // what the models are to be loaded with; what is null is usual
const KV_TYPES = ["f16", "q8_0", "q5_1", "q4_0", "f32"];
const ownSpecs = {}; // of each model: { draft_model, heads }
let actLoaded = null; // what the dialog was opened for, to be done with the model that is chosen there

const given = (all) => Object.fromEntries(Object.entries(all).filter(([, value]) => value != null));
const loadQuery = () => new URLSearchParams(given(loadWith));
const isLoaded = ({ name }) => server.status?.model?.spec.model === name;
const modelsBox = () => $("#models");
const joined = (by, parts) => parts.filter(Boolean).join(by);
const quiet = (text) => text && h("p.quiet", text);

export async function openModels(act = null) {
  actLoaded = act;
  const { spec, n_threads, gpu_layers: [n_layers, of] = [] } = server.status?.model ?? {};
  if (spec) {
    loadWith = settingsOf(spec);
    openedModel = spec.model;
    ownSpecs[spec.model] = { draft_model: spec.draft_model, heads: spec.heads };
  }
  const field = (name, title, label, made, unit) => h("label", { title }, label, Object.assign(made, { name }), unit);
  const number = (min, step, placeholder) => h("input", { type: "number", min, step, placeholder });
  const search = lineForm("Repository on the Hub", "owner/repository on the Hub", "List files", readHub);
  const byPath = lineForm("Path or name of a model", "Path of a .gguf file", "Load", loadFile);
  const typed = () => $("input", byPath).value.replace(/[^/\\]*\.gguf$/, "");
  byPath.append(plain("Browse…", tried(() => readFolder(typed())), { id: "browse" }));
  const context = "--ctx; empty: the model's own, as far as memory allows";
  const cache = "--kv-type; q8_0 takes half the memory of f16, q4_0 a quarter";
  const types = selectOf({}, KV_TYPES.map((type) => [type]));
  const exact = h("input", { type: "checkbox" });
  const advanced = [
    field("n_threads", "--threads", "CPU threads", number(1, 1, n_threads)),
    field("n_gpu_layers", "--gpu-layers", "Layers on the GPU", number(0, 1, n_layers)),
    quiet(of && `Now: ${n_threads} threads, ${n_layers} of ${of} layers on the GPU`),
  ];
  const onchange = tried(() => takeFields(dialog));
  const fields = h(
    "div",
    { onchange },
    h(
      "div.row",
      field("n_ctx", context, "Context", number(0, 256, "own"), "tokens"),
      field("kv_type", cache, "KV cache", types),
      field("exact", "--exact; at some cost in speed", "", exact, "The very same text as plain decoding"),
    ),
    h("details", h("summary.quiet", "Advanced"), h("div.row", ...advanced)),
  );
  const [about, ...found] = ["computed-by", "folder", "hub", "models"].map((id) => h("div", { id }));
  found[2].append(quiet("Reading the models…"));
  const title = act ? "Answer again with another model" : "Models";
  const dialog = openDialog(title, "wide models", about, fields, h("div.row", search, byPath), ...found);
  dialog.addEventListener("close", () => (modelList = hubList = folder = null));
  showFields(dialog);
  await tried(readModels)();
}

// What the models are to be loaded with, in the dialog's fields of these names.
function showFields(dialog) {
  for (const field of $$("[name]", dialog)) {
    if (field.type === "checkbox") field.checked = loadWith[field.name];
    else field.value = loadWith[field.name] ?? "";
  }
}

async function takeFields(dialog) {
  for (const { name, type, value, min, checked } of $$("[name]", dialog)) {
    const number = value === "" ? null : Math.max(min, Math.round(value));
    loadWith[name] = type === "checkbox" ? checked : type === "number" ? number : value;
  }
  await readModels();
  if (hubList) await readHub(hubList.repo);
}

function lineForm(label, placeholder, verb, action) {
  const line = h("input", { "aria-label": label, placeholder });
  const onsubmit = () => line.value.trim() && tried(action)(line.value);
  return h("form", { onsubmit }, line, h("button.plain", verb));
}

const settingsOf = ({ n_ctx, kv_type, exact, n_threads, n_gpu_layers }) =>
  ({ n_ctx: n_ctx || null, kv_type, exact, n_threads, n_gpu_layers });
const loadFile = (path) => load({ name: path.trim().replaceAll('"', ""), heads: [] });
const load = (model) => loadModel(modelSpec(model), actLoaded);

// The folders and models in a folder of the server's machine.
async function readFolder(path) {
  folder = await api("GET", `/models/browse?folder=${encodeURIComponent(path)}`);
  showModels();
}

function folderList() {
  if (!folder) return [];
  const go = (path) => tried(() => readFolder(path));
  const { folder: value, folders, files, parent } = folder;
  const isKept = modelList.folders.includes(value);
  const entry = (one, label, action) => h("li", { id: `in ${one.path}` }, button(label, action, { class: "name" }));
  const up = entry({ path: "" }, "↑ The folder above", go(parent));
  const rest = [
    ...folders.map((one) => entry(one, `${one.name}/`, go(one.path))),
    ...files.map((one) => entry(one, `${one.name}, ${inSize(one.n_bytes)}: load`, () => loadFile(one.path))),
  ];
  const look = tried(() => keep("folders", value, !isKept));
  const looks = plain(`${isKept ? "Stop looking" : "Always look"} here for models`, look);
  const close = plain("Close", () => ((folder = null), showModels()));
  return [h("h3", value), h("div.row", looks, close), h("ul.folder", up, ...rest)];
}

async function readModels() {
  const read = await api("GET", `/models?${loadQuery()}`);
  if (!modelsBox()) return;
  modelList = read;
  showModels();
}

async function readHub(repo) {
  if (!hubList) $("#hub").replaceChildren(quiet("Asking the Hub…"));
  try {
    hubList = await api("GET", `/models/hub?repo=${encodeURIComponent(repo)}&${loadQuery()}`);
  } catch (error) {
    hubList = null;
    throw error;
  } finally {
    showModels();
  }
}

let refreshing = 0;
export function refreshModels() {
  if (!modelsBox()) return;
  clearTimeout(refreshing);
  const read = () => Promise.all([readModels(), hubList && readHub(hubList.repo)]);
  refreshing = setTimeout(tried(read), 200);
}

listeners.models = () => (refreshModels(), findDraft());

// The draft model that fits the loaded model is offered on the start page and in the model's row.
let draft = {};
const RACE = "Write a Python function that adds up each column of a CSV file, with a docstring and a test.";

export const findDraft = tried(async () => {
  draft = await api("GET", "/models/draft");
  const line = $("#draft");
  render(line, ...(draft.name ? offerDraft() : []));
  line.hidden = !draft.name;
  showModels();
}, () => h("p")); // nobody waits for it

function offerDraft() {
  const tryIt = () => {
    const { spec } = server.status.model;
    loadWith = settingsOf(spec);
    const race = () => openRace({ prompt: RACE, start: true, method: "draft" });
    loadModel({ model: spec.model, draft_model: draft.name, heads: spec.heads }, race);
  };
  return [`${draft.title} has the same vocabulary and can draft for it. `, plain("Try it in a race", tryIt)];
}

let toldError; // of a load, which is brought into view once
export function showModels() {
  if (!modelList || !modelsBox()) return;
  setText($("#computed-by"), modelList.computed_by);
  $("#browse").hidden = !modelList.can_browse;
  const groups = { "On this machine": [], "Downloaded in part": [], "Known, to download": [] };
  for (const model of modelList.models) groups[groupOf(model)].push(modelRow(model));
  const filled = Object.entries(groups).filter(([, rows]) => rows.length);
  render($("#folder"), ...folderList());
  render(modelsBox(), ...filled.flatMap(([title, rows]) => [h("h3", title), h("ul", ...rows)]));
  const error = $("[role=alert]", modelsBox());
  if (error && error.textContent !== toldError) error.scrollIntoView({ block: "nearest" });
  toldError = error?.textContent;
  const { repo, models = [] } = hubList ?? {};
  const none = !models.length && quiet("This repository has no GGUF of a model.");
  render($("#hub"), ...(repo ? [h("h3", `Hub: ${repo}`), none || h("ul", ...models.map(modelRow))] : []));
}

function groupOf({ is_here, is_recent, can_download, part }) {
  if (is_here || (is_recent && !can_download)) return "On this machine";
  return part ? "Downloaded in part" : "Known, to download";
}

function modelRow(model) {
  const isOpen = openedModel === model.name;
  const onclick = () => ((openedModel = isOpen ? "" : model.name), showModels());
  const { part, trouble } = model;
  const loading = server.status?.loading;
  const isLoading = loading?.model === model.name;
  const { done, total } = (isLoading ? loading : part) ?? {};
  const state = isLoading ? progressOf(loading) : part && `Here: ${inSize(done)} of ${inSize(total)}`;
  const about = [h("b", model.title), h("span.quiet", ...modelFacts(model))];
  const name = button(about, onclick, { class: "name", "aria-expanded": String(isOpen) });
  return h(
    "li.model",
    { id: `model ${model.name}` },
    h("div.head", name, ...modelActions(model)),
    loadTrouble(model) || (trouble && h("p", { class: model.is_here ? "error" : "quiet" }, trouble)),
    state && quiet(state),
    state && h("progress", { "aria-label": "Downloaded", ...(total && { max: total, value: done }) }),
    isOpen && modelDetails(model),
  );
}

function loadTrouble({ name }) {
  const text = loadError(name);
  const dismiss = plain("Dismiss", () => (dismissError(), showModels()));
  return text && h("p.error", { role: "alert" }, `${text} `, dismiss);
}

function modelFacts({ facts, shape, fit, speeds, is_here }) {
  const speed = speeds.auto ?? speeds.plain;
  const fits = fit?.fits ? (fit.is_least ? "should fit" : "fits") : fit?.fits === false && "too large";
  return [
    joined(" · ", [facts, is_here && !shape.has_template && "no chat template"]),
    fits && " · ",
    fits && h("span", { class: fit.fits ? "fits" : "too-large" }, fits),
    speed && ` · ${Math.round(speed)} tokens/s`,
  ];
}

const modelButton = ({ title }, label, action, attributes) =>
  plain(label, tried(action), { "aria-label": `${label}: ${title}`, ...attributes });

function modelActions(model) {
  const act = (...given) => modelButton(model, ...given);
  const loading = server.status?.loading;
  if (loading?.model === model.name) return [act("Cancel", () => api("DELETE", "/models/load"))];
  if (isLoaded(model)) return [h("span.quiet", "loaded")];
  const start = () => load(model); // the loaded model goes on meanwhile
  if (model.is_here) return [act(actLoaded ? "Answer" : "Load", start, { class: "primary" })];
  if (!model.can_download) return [];
  if (!model.can_delete) return [act(actLoaded ? "Download and answer" : "Download and load", start)];
  return [act("Resume", start), act("Delete…", () => deleteModel(model))]; // a part is here
}

// What a model is loaded with: its own choice, else what models.txt pairs if the loaded one has such.
function modelSpec(model) {
  const before = server.status?.model?.spec;
  const draft_model = before?.draft_model && model.draft ? model.draft : null;
  return { model: model.name, draft_model, heads: before?.heads?.length ? model.heads : [], ...ownSpecs[model.name] };
}

function modelDetails(model) {
  const { shape, fit, speeds } = model;
  const act = (...given) => modelButton(model, ...given);
  const canListOthers = fit?.fits === false && model.repo && !hubList;
  const { architecture, n_layer, n_head_kv, has_template } = shape;
  const template = has_template ? "chat template" : "no chat template: it continues texts";
  const layers = n_layer ? [`${n_layer} layers`, n_head_kv && `${n_head_kv} KV heads`, template] : [];
  const speed = (word, name) => speeds[name] && `${word} ${Math.round(speeds[name])} tokens/s`;
  const measured = joined(", ", [speed("reads", "prompt"), speed("plain", "plain"), speed("Auto", "auto")]);
  const changes = (fit?.changes ?? []).map((change) => act(change.text, () => applyChange(change)));
  return h(
    "div.more",
    quiet(joined(". ", [model.description, model.name !== model.title && model.name])),
    quiet(joined(" · ", [architecture, ...layers])),
    quiet(joined(" ", [fit?.sentence, model.beside])),
    h("div.row", ...changes, canListOthers && act("See other quantisations", () => readHub(model.repo))),
    quiet(measured && `Measured here: ${measured}`),
    ...modelExtras(model),
    isLoaded(model) && draft.name && h("p", ...offerDraft()),
    h(
      "div.row",
      isLoaded(model) && act("Load again", () => load(model)),
      model.is_here && model.can_delete && act("Delete…", () => deleteModel(model)),
      model.is_recent && act("Remove from this list", () => keep("recent", model.name, false)),
    ),
  );
}

const keep = (kind, value, keeps) => api("POST", "/models/kept", { kind, value, keeps });

// The draft models with its vocabulary, and the heads that models.txt or the loaded model has.
function modelExtras(model) {
  if (!model.is_here) return [];
  const spec = modelSpec(model);
  const now = spec.draft_model === "paired" ? model.draft : spec.draft_model;
  const choices = [...new Set([model.draft, now, ...model.drafts].filter(Boolean))];
  const label = (name) => modelList.models.find((one) => one.name === name)?.title ?? name;
  const heads = spec.heads.includes("paired") ? model.heads : spec.heads;
  const set = (changes) => {
    const { draft_model, heads } = modelSpec(model);
    ownSpecs[model.name] = { draft_model, heads, ...changes };
  };
  const onchange = ({ target }) => set({ draft_model: target.value || null });
  const draft = selectOf({ onchange }, [["", "None"], ...choices.map((name) => [name, label(name)])], now ?? "");
  const title = "--draft-model; a smaller model of the same family";
  const parts = choices.length ? [h("label", { title }, "Draft model", draft)] : [];
  const all = [...new Set([...model.heads, ...heads])];
  if (!all.length) return parts;
  const boxes = all.map((value) => h("input", { type: "checkbox", value, checked: heads.includes(value) }));
  const chosen = ({ currentTarget }) => $$(":checked", currentTarget).map(({ value }) => value);
  const meaning = "--heads; trained on this model, one for each method";
  const take = { role: "group", "aria-label": "Drafting heads", onchange: (event) => set({ heads: chosen(event) }) };
  const labels = boxes.map((box) => h("label", box, box.value));
  return [...parts, h("div.row", take, h("span.quiet", { title: meaning }, "Drafting heads"), ...labels)];
}

async function applyChange({ model, text, ...changes }) {
  if (model) openedModel = model;
  else Object.assign(loadWith, given(changes));
  showFields(modelsBox().parentElement);
  await readModels();
}

// Loads a model, and then does what it is wanted for.
let awaited = {}; // { model, act }
const loadModel = tried(async (spec, act = null) => {
  awaited = { model: spec.model, act };
  askedFor(spec.model);
  await api("POST", "/models/load", { ...spec, ...given(loadWith) });
  if (act) $("dialog.models")?.close(); // the header tells how far it is
  refreshModels();
});

export function takeLoad(before, { model, loading, error, load = model?.load }) {
  const { act } = awaited;
  const isThere = load !== before.model?.load && model?.spec.model === awaited.model;
  const hasFailed = before.loading?.model === awaited.model && !loading && (model || error); // not while none is there
  if (isThere || hasFailed) awaited = {};
  if (isThere) act?.();
  if (load !== before.model?.load) findDraft();
}

async function deleteModel({ name, title, is_here, shape, part }) {
  const takes = inSize(is_here ? shape.n_bytes : part.done);
  const question = is_here ? "Delete this model’s file?" : "Delete the part that was downloaded?";
  const text = `${title} takes ${takes} on disk. Deleting it cannot be undone.`;
  if (!(await askWhether(question, text, "Delete", "Keep"))) return;
  const { freed } = await api("DELETE", "/models/files", { name });
  notify(`Deleted ${title}: ${inSize(freed)} are free again`);
}

// A method needs something that is not loaded, and models.txt pairs it with the model.
export async function offerMissing(method, { setting, offer }) {
  const { name, ...loaded } = server.status.model;
  const text = `Load ${name} again with ${offer.join(", ")}? A file that is not on this machine is downloaded first.`;
  const question = `The method ${titleOf(method)} needs ${NEEDS[setting]}`;
  if (!(await askWhether(question, text, "Load", "Not now"))) return;
  changeSettings({ method, parameters: {} });
  const { model, draft_model, heads } = loaded.spec;
  const beside = setting === "heads" ? { heads: [...heads, ...offer] } : { draft_model: offer[0] };
  loadWith = settingsOf(loaded.spec);
  loadModel({ model, draft_model, heads, ...beside });
}
