// The models: those on this machine, those that models.txt names, and any GGUF of the Hub.

import { $, $$, askWhether, button, h, inSize, notify, openDialog, render, selectOf, setText, tried } from "./dom.js";
import { api, listeners } from "./api.js";
import {
  NEEDS, askedFor, changeSettings, dismissError, loadError, progressOf, server, titleOf,
} from "./settings.js";
import { openRace } from "./race.js";

let modelList = null; // as GET page/models says, while the dialog is open
let hubList = null; // as GET page/models/hub says
let openedModel = ""; // whose details are shown
let folder = null; // as GET page/models/browse says
let loadWith = { n_ctx: 0, kv_type: "f16", exact: false }; // what the models are to be loaded with
const KV_TYPES = ["f16", "q8_0", "q5_1", "q4_0", "f32"];
const ownSpecs = {}; // of each model: { draft_model, heads }

const loadQuery = () =>
  `n_ctx=${loadWith.n_ctx}&kv_type=${loadWith.kv_type}` +
  (loadWith.n_gpu_layers == null ? "" : `&n_gpu_layers=${loadWith.n_gpu_layers}`);
const isLoaded = ({ name }) => server.status?.model?.spec.model === name;
const modelsBox = () => $("#models");
const joined = (by, parts) => parts.filter(Boolean).join(by);
const quiet = (text) => text && h("p", { class: "quiet" }, text);

export async function openModels() {
  const spec = server.status?.model?.spec;
  if (spec) {
    loadWith = settingsOf(spec);
    openedModel = spec.model;
    ownSpecs[spec.model] = { draft_model: spec.draft_model, heads: spec.heads };
  }
  const value = loadWith.n_ctx || "";
  const n_ctx = h("input", { type: "number", min: 0, step: 256, value, placeholder: "own" });
  const kv_type = selectOf({}, KV_TYPES.map((type) => [type]), loadWith.kv_type);
  const { n_threads, gpu_layers: [n_layers, of] = [0, 0] } = server.status?.model ?? {};
  const numberOf = (name, attributes, now) => {
    const field = h("input", { type: "number", value: loadWith[name] ?? "", placeholder: now, ...attributes });
    field.onchange = () => {
      loadWith[name] = field.value === "" ? null : Math.max(field.min, Math.round(Number(field.value)));
      change();
    };
    return field;
  };
  const exact = h("input", { type: "checkbox", checked: loadWith.exact });
  exact.onchange = () => (loadWith.exact = exact.checked);
  const change = tried(async () => {
    loadWith.n_ctx = Math.max(0, Math.round(Number(n_ctx.value) || 0));
    loadWith.kv_type = kv_type.value;
    await readModels();
    if (hubList) await readHub(hubList.repo);
  }, modelError);
  n_ctx.onchange = kv_type.onchange = change;
  const search = lineForm("Repository on the Hub", "owner/repository on the Hub", "List files", readHub);
  const byPath = lineForm("Path or name of a model", "Path of a .gguf file", "Load", loadFile);
  const typed = () => $("input", byPath).value.replace(/[^/\\]*\.gguf$/, "");
  byPath.append(button("Browse…", tried(() => readFolder(typed()), modelError), { class: "plain", id: "browse" }));
  const dialog = openDialog(
    "Models",
    "wide models",
    h("p", { class: "quiet", id: "computed-by" }),
    h(
      "div",
      { class: "row" },
      h("label", { title: "--ctx; empty: the model's own, as far as memory allows" }, "Context", n_ctx, "tokens"),
      h("label", { title: "--kv-type; q8_0 takes half the memory of f16, q4_0 a quarter" }, "KV cache", kv_type),
      h("label", { title: "--exact; at some cost in speed" }, exact, "The very same text as plain decoding"),
    ),
    h(
      "details",
      {},
      h("summary", { class: "quiet" }, "Advanced"),
      h(
        "div",
        { class: "row" },
        h("label", { title: "--threads" }, "CPU threads", numberOf("n_threads", { min: 1 }, n_threads)),
        h("label", { title: "--gpu-layers" }, "Layers on the GPU", numberOf("n_gpu_layers", { min: 0 }, n_layers)),
        quiet(of && `Now: ${n_threads} threads, ${n_layers} of ${of} layers on the GPU`),
      ),
    ),
    h("p", { class: "error", id: "models-error", role: "alert", hidden: true }),
    h("div", { class: "row" }, search, byPath),
    h("div", { id: "folder" }),
    h("div", { id: "hub" }),
    h("div", { id: "models" }, quiet("Reading the models…")),
  );
  dialog.addEventListener("close", () => (modelList = hubList = folder = null));
  await tried(readModels, modelError)();
}

function lineForm(label, placeholder, verb, action) {
  const line = h("input", { "aria-label": label, placeholder });
  const onsubmit = (event) => {
    event.preventDefault();
    if (line.value.trim()) tried(action, modelError)(line.value);
  };
  return h("form", { onsubmit }, line, h("button", { class: "plain" }, verb));
}

const modelError = () => $("#models-error") ?? $("#alert");

const settingsOf = ({ n_ctx, kv_type, exact, n_threads, n_gpu_layers }) => ({
  n_ctx, kv_type, exact, n_threads, n_gpu_layers,
});
const loadFile = (path) => loadModel({ model: path.trim().replaceAll('"', ""), draft_model: null, heads: [] });

// The folders and models in a folder of the server's machine.
async function readFolder(path) {
  folder = await api("GET", `/models/browse?folder=${encodeURIComponent(path)}`);
  showModels();
}

function folderList() {
  if (!folder) return [];
  const go = (path) => tried(() => readFolder(path), modelError);
  const keep = (value, keeps) => tried(() => api("POST", "/models/kept", { kind: "folders", value, keeps }), modelError);
  const { folders, files, parent } = folder;
  const isKept = modelList.folders.includes(folder.folder);
  const entry = (one, label, action) => h("li", { id: `in ${one.path}` }, button(label, action, { class: "name" }));
  const up = entry({ path: "" }, "↑ The folder above", go(parent));
  const rest = [
    ...folders.map((one) => entry(one, `${one.name}/`, go(one.path))),
    ...files.map((one) => entry(one, `${one.name}, ${inSize(one.n_bytes)}: load`, () => loadFile(one.path))),
  ];
  return [
    h("h3", {}, folder.folder),
    h(
      "div",
      { class: "row" },
      button(isKept ? "Stop looking here for models" : "Always look here for models", keep(folder.folder, !isKept), {
        class: "plain",
      }),
      button("Close", () => ((folder = null), showModels()), { class: "plain" }),
    ),
    h("ul", { class: "folder" }, up, ...rest),
  ];
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
  refreshing = setTimeout(tried(read, modelError), 200);
}

listeners.models = () => {
  refreshModels();
  findDraft();
};

// The draft model that fits the loaded model is offered on the start page and in the model's row.
let draft = {};
let raceWith = ""; // the draft model that is being loaded for a race
const RACE = "Write a Python function that adds up each column of a CSV file, with a docstring and a test.";

export const findDraft = tried(async () => {
  draft = await api("GET", "/models/draft");
  const line = $("#draft");
  render(line, ...(draft.name ? offerDraft() : []));
  line.hidden = !draft.name;
  showModels();
  if (!raceWith || server.status.model?.spec.draft_model !== raceWith) return;
  raceWith = "";
  $("dialog.models")?.close();
  openRace({ prompt: RACE, start: true, method: "draft" });
}, () => h("p")); // nobody waits for it

function offerDraft() {
  const tryIt = () => {
    const { spec } = server.status.model;
    loadWith = settingsOf(spec);
    loadModel({ model: spec.model, draft_model: draft.name, heads: spec.heads }, draft.name);
  };
  return [
    `${draft.title} has the same vocabulary and can draft for it. `,
    button("Try it in a race", tryIt, { class: "plain" }),
  ];
}

export function showModels() {
  if (!modelList || !modelsBox()) return;
  setText($("#computed-by"), modelList.computed_by);
  $("#browse").hidden = !modelList.can_browse;
  const { models } = modelList;
  const groups = [
    ["On this machine", models.filter((one) => one.is_here || (one.is_recent && !one.can_download))],
    ["Downloaded in part", models.filter((one) => !one.is_here && one.part)],
    ["Known, to download", models.filter((one) => !one.is_here && !one.part && (one.can_download || !one.is_recent))],
  ];
  render($("#folder"), ...folderList());
  const shown = groups.filter(([, models]) => models.length).flatMap(modelGroup);
  render(modelsBox(), ...shown);
  render($("#hub"), ...(hubList ? modelGroup([`Hub: ${hubList.repo}`, hubList.models]) : []));
}

function modelGroup([title, models]) {
  const none = quiet("This repository has no GGUF of a model.");
  return [h("h3", {}, title), models.length ? h("ul", {}, ...models.map(modelRow)) : none];
}

function modelRow(model) {
  const isOpen = openedModel === model.name;
  const onclick = () => {
    openedModel = isOpen ? "" : model.name;
    showModels();
  };
  const { part, trouble } = model;
  const loading = server.status?.loading;
  const isLoading = loading?.model === model.name;
  const { done, total } = (isLoading ? loading : part) ?? {};
  const state = isLoading ? progressOf(loading) : part && `Here: ${inSize(done)} of ${inSize(total)}`;
  const name = button(
    [h("b", {}, model.title), h("span", { class: "quiet" }, ...modelFacts(model))],
    onclick,
    { class: "name", "aria-expanded": String(isOpen) },
  );
  return h(
    "li",
    { class: "model", id: `model ${model.name}` },
    h("div", { class: "head" }, name, ...modelActions(model)),
    loadTrouble(model) || (trouble && h("p", { class: model.is_here ? "error" : "quiet" }, trouble)),
    state && quiet(state),
    state && h("progress", { "aria-label": "Downloaded", ...(total && { max: total, value: done }) }),
    isOpen && modelDetails(model),
  );
}

function loadTrouble({ name }) {
  const text = loadError(name);
  const dismiss = () => {
    dismissError();
    showModels();
  };
  return text && h("p", { class: "error", role: "alert" }, `${text} `, button("Dismiss", dismiss, { class: "plain" }));
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

function modelButton({ title }, label, action, attributes) {
  const names = { "aria-label": `${label}: ${title}`, class: "plain" };
  return button(label, tried(action, modelError), { ...names, ...attributes });
}

function modelActions(model) {
  const act = (...given) => modelButton(model, ...given);
  const loading = server.status?.loading;
  if (loading?.model === model.name) return [act("Cancel", () => api("DELETE", "/models/load"))];
  if (isLoaded(model)) return [h("span", { class: "quiet" }, "loaded")];
  if (model.is_here) return [act("Load", () => loadModel(modelSpec(model)), { class: "primary" })];
  if (!model.can_download) return [];
  const start = () => loadModel(modelSpec(model)); // the loaded model goes on meanwhile
  if (!model.can_delete) return [act("Download and load", start)];
  return [act("Resume", start), act("Delete…", () => deleteModel(model))]; // a part is here
}

// What a model is loaded with: its own choice, else what models.txt pairs if the loaded one has such.
function modelSpec(model) {
  const before = server.status?.model?.spec;
  const usual = {
    draft_model: before?.draft_model && model.draft ? model.draft : null,
    heads: before?.heads?.length ? model.heads : [],
  };
  return { model: model.name, ...usual, ...ownSpecs[model.name] };
}

function modelDetails(model) {
  const { shape, fit, speeds } = model;
  const act = (...given) => modelButton(model, ...given);
  const canListOthers = fit?.fits === false && model.repo && !hubList;
  const measured = [
    speeds.prompt && `reads ${Math.round(speeds.prompt)} tokens/s`,
    speeds.plain && `plain ${Math.round(speeds.plain)} tokens/s`,
    speeds.auto && `Auto ${Math.round(speeds.auto)} tokens/s`,
  ];
  return h(
    "div",
    { class: "more" },
    quiet(joined(". ", [model.description, model.name !== model.title && model.name])),
    quiet(
      joined(" · ", [
        shape.architecture,
        shape.n_layer && `${shape.n_layer} layers`,
        shape.n_head_kv && `${shape.n_head_kv} KV heads`,
        shape.n_layer && (shape.has_template ? "chat template" : "no chat template: it continues texts"),
      ]),
    ),
    quiet(joined(" ", [fit?.sentence, model.beside])),
    h(
      "div",
      { class: "row" },
      ...(fit?.changes ?? []).map((change) => act(change.text, () => applyChange(change))),
      canListOthers && act("See other quantisations", () => readHub(model.repo)),
    ),
    measured.some(Boolean) && quiet(`Measured here: ${joined(", ", measured)}`),
    ...modelExtras(model),
    isLoaded(model) && draft.name && h("p", {}, ...offerDraft()),
    h(
      "div",
      { class: "row" },
      isLoaded(model) && act("Load again", () => loadModel(modelSpec(model))),
      model.is_here && model.can_delete && act("Delete…", () => deleteModel(model)),
      model.is_recent && act("Remove from this list", () => forgetModel(model)),
    ),
  );
}

const forgetModel = ({ name }) => api("POST", "/models/kept", { kind: "recent", value: name, keeps: false });

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
  const group = h(
    "div",
    { class: "row", role: "group", "aria-label": "Drafting heads", onchange: (event) => set({ heads: chosen(event) }) },
    h("span", { class: "quiet", title: meaning }, "Drafting heads"),
    ...boxes.map((box) => h("label", {}, box, box.value)),
  );
  return [...parts, group];
}

async function applyChange({ n_ctx, kv_type, n_gpu_layers, model }) {
  if (model) {
    openedModel = model;
    return showModels();
  }
  loadWith.n_ctx = n_ctx ?? loadWith.n_ctx;
  loadWith.kv_type = kv_type ?? loadWith.kv_type;
  loadWith.n_gpu_layers = n_gpu_layers ?? loadWith.n_gpu_layers;
  $(".models input[type=number]").value = loadWith.n_ctx || "";
  $(".models .row select").value = loadWith.kv_type;
  await readModels();
}

const loadModel = tried(async (spec, racing = "") => {
  raceWith = racing;
  askedFor(spec.model);
  await api("POST", "/models/load", { ...spec, ...loadWith });
  refreshModels();
}, modelError);

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
  const text =
    `Load ${name} again with ${offer.join(", ")}? ` +
    "A file that is not on this machine is downloaded first.";
  const question = `The method ${titleOf(method)} needs ${NEEDS[setting]}`;
  if (!(await askWhether(question, text, "Load", "Not now"))) return;
  changeSettings({ method, parameters: {} });
  const { model, draft_model, heads } = loaded.spec;
  const beside = setting === "heads" ? { heads: [...heads, ...offer] } : { draft_model: offer[0] };
  loadWith = settingsOf(loaded.spec);
  loadModel({ model, draft_model, heads, ...beside });
}
