// The models: those on this machine, those that models.txt names, and any GGUF of the Hub.

import { $, button, h, inSize, notify, openDialog, setText, tried } from "./dom.js";
import { api, listeners } from "./api.js";
import { NEEDS, changeSettings, progressOf, server, titleOf } from "./settings.js";

let modelList = null; // as GET page/models says, while the dialog is open
let hubList = null; // as GET page/models/hub says
let openedModel = ""; // whose details are shown
let loadWith = { n_ctx: 0, kv_type: "f16", exact: false }; // what the models are to be loaded with
const ownSpecs = {}; // of each model: { draft_model, heads }

const loadQuery = () => `n_ctx=${loadWith.n_ctx}&kv_type=${loadWith.kv_type}`;
const isLoaded = ({ name }) => server.status?.model?.spec.model === name;
const modelsBox = () => $("#models");

export async function openModels() {
  const spec = server.status?.model?.spec;
  if (spec) {
    loadWith = { n_ctx: spec.n_ctx, kv_type: spec.kv_type, exact: spec.exact };
    openedModel = spec.model;
    ownSpecs[spec.model] = { draft_model: spec.draft_model, heads: spec.heads };
  }
  const value = loadWith.n_ctx || "";
  const n_ctx = h("input", { type: "number", min: 0, step: 256, value, placeholder: "own" });
  const kv_type = h("select", {}, ...["f16", "q8_0", "q5_1", "q4_0", "f32"].map((type) => h("option", {}, type)));
  kv_type.value = loadWith.kv_type;
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
  const byPath = lineForm("Path or name of a model", "Path of a .gguf file", "Load", (model) =>
    loadModel({ model, draft_model: null, heads: [] }),
  );
  const dialog = openDialog(
    "Models",
    h("p", { class: "quiet", id: "computed-by" }),
    h(
      "div",
      { class: "row" },
      h("label", { title: "--ctx; empty: the model's own, as far as memory allows" }, "Context", n_ctx, "tokens"),
      h("label", { title: "--kv-type; q8_0 takes half the memory of f16, q4_0 a quarter" }, "KV cache", kv_type),
      h("label", { title: "--exact; at some cost in speed" }, exact, "The very same text as plain decoding"),
    ),
    h("p", { class: "error", id: "load-error", role: "alert", hidden: true }),
    h("p", { class: "error", id: "models-error", role: "alert", hidden: true }),
    h("div", { class: "row" }, search, byPath),
    h("div", { id: "hub" }),
    h("div", { id: "models" }, h("p", { class: "quiet" }, "Reading the models…")),
  );
  dialog.classList.add("wide", "models");
  dialog.addEventListener("close", () => (modelList = hubList = null));
  await tried(readModels, modelError)();
}

function lineForm(label, placeholder, verb, action) {
  const line = h("input", { "aria-label": label, placeholder });
  const form = h("form", {}, line, h("button", {}, verb));
  form.onsubmit = (event) => {
    event.preventDefault();
    if (line.value.trim()) tried(() => action(line.value), modelError)();
  };
  return form;
}

const modelError = () => $("#models-error") ?? $("#alert");

async function readModels() {
  const read = await api("GET", `/models?${loadQuery()}`);
  if (!modelsBox()) return;
  modelList = read;
  showModels();
}

async function readHub(repo) {
  if (!hubList) $("#hub").replaceChildren(h("p", { class: "quiet" }, "Asking the Hub…"));
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

listeners.models = refreshModels;

export function showModels() {
  if (!modelList || !modelsBox()) return;
  const focused = document.activeElement?.dataset?.key;
  setText($("#computed-by"), modelList.computed_by);
  setText($("#load-error"), server.status?.error ?? "");
  const groups = [
    ["On this machine", modelList.models.filter((one) => one.is_here)],
    ["Downloaded in part", modelList.models.filter((one) => !one.is_here && one.part)],
    ["Known, to download", modelList.models.filter((one) => !one.is_here && !one.part)],
  ];
  modelsBox().replaceChildren(...groups.flatMap(([title, models]) => modelGroup(title, models)));
  $("#hub").replaceChildren(...(hubList ? modelGroup(`Hub: ${hubList.repo}`, hubList.models) : []));
  if (focused) $(`.models [data-key="${CSS.escape(focused)}"]`)?.focus();
}

function modelGroup(title, models) {
  const none = title.startsWith("Hub") ? "This repository has no GGUF of a model." : "";
  if (!models.length && !none) return [];
  const list = models.length ? h("ul", {}, ...models.map(modelRow)) : h("p", { class: "quiet" }, none);
  return [h("h3", {}, title), list];
}

function modelRow(model) {
  const isOpen = openedModel === model.name;
  const open = () => {
    openedModel = isOpen ? "" : model.name;
    showModels();
  };
  const key = { "aria-expanded": String(isOpen), "data-key": `name ${model.name}` };
  const name = h(
    "button",
    { type: "button", class: "name", onclick: open, ...key },
    h("b", {}, model.title),
    h("span", { class: "quiet" }, ...modelFacts(model)),
  );
  const row = h("li", { class: "model" }, h("div", { class: "head" }, name, ...modelActions(model)));
  const { part, trouble } = model;
  const loading = server.status?.loading;
  const isLoading = loading?.model === model.name;
  if (trouble) row.append(h("p", { class: model.is_here ? "error" : "quiet" }, trouble));
  if (isLoading) row.append(h("p", { class: "quiet" }, progressOf(loading)));
  else if (part) row.append(h("p", { class: "quiet" }, `Here: ${inSize(part.done)} of ${inSize(part.total)}`));
  if (isLoading || part) {
    const { done, total } = isLoading ? loading : part;
    row.append(h("progress", { "aria-label": "Downloaded", ...(total && { max: total, value: done }) }));
  }
  if (isOpen) row.append(modelDetails(model));
  return row;
}

function modelFacts({ shape, fit, speeds, is_here }) {
  const facts = [
    shape.n_bytes && inSize(shape.n_bytes),
    shape.size_label,
    shape.file_type,
    shape.n_ctx_train && `${shape.n_ctx_train.toLocaleString("en")} tokens`,
    is_here && !shape.has_template && "no chat template",
  ].filter(Boolean);
  const speed = speeds.auto ?? speeds.plain;
  const parts = [facts.join(" · ")];
  if (fit?.fits) parts.push(" · ", h("span", { class: "fits" }, fit.is_least ? "should fit" : "fits"));
  if (fit?.fits === false) parts.push(" · ", h("span", { class: "too-large" }, "too large"));
  if (speed) parts.push(` · ${Math.round(speed)} tokens/s`);
  return parts;
}

function modelButton({ name, title }, label, action, attributes) {
  const names = { "aria-label": `${label}: ${title}`, "data-key": `${label} ${name}` };
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
  return [act("Resume", start), act("Delete…", () => confirmModelDelete(model))]; // a part is here
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
  const line = (text) => text && h("p", { class: "quiet" }, text);
  const act = (...given) => modelButton(model, ...given);
  const form = [
    shape.architecture,
    shape.n_layer && `${shape.n_layer} layers`,
    shape.n_head_kv && `${shape.n_head_kv} KV heads`,
    shape.n_layer && (shape.has_template ? "chat template" : "no chat template: it continues texts"),
  ].filter(Boolean);
  const measured = [
    speeds.prompt && `reads ${Math.round(speeds.prompt)} tokens/s`,
    speeds.plain && `plain ${Math.round(speeds.plain)} tokens/s`,
    speeds.auto && `Auto ${Math.round(speeds.auto)} tokens/s`,
  ].filter(Boolean);
  const changes = (fit?.changes ?? []).map((change) => act(change.text, () => applyChange(change)));
  if (fit?.fits === false && model.repo && !hubList) {
    changes.push(act("See other quantisations", () => readHub(model.repo)));
  }
  const row = [
    isLoaded(model) && act("Load again", () => loadModel(modelSpec(model))),
    model.is_here && model.can_delete && act("Delete…", () => confirmModelDelete(model)),
  ].filter(Boolean);
  return h(
    "div",
    { class: "more" },
    line(model.description),
    line(form.join(" · ")),
    line([fit?.sentence, model.beside].filter(Boolean).join(" ")),
    changes.length > 0 && h("div", { class: "row" }, ...changes),
    line(measured.length && `Measured here: ${measured.join(", ")}`),
    ...modelExtras(model),
    row.length > 0 && h("div", { class: "row" }, ...row),
  );
}

// Draft model and heads, where models.txt or the loaded model has some.
function modelExtras(model) {
  if (!model.is_here) return [];
  const spec = modelSpec(model);
  const here = modelList.models.filter((one) => one.is_here && one.name !== model.name);
  const names = here.map((one) => one.name);
  const now = spec.draft_model === "paired" ? model.draft : spec.draft_model;
  const choices = [...new Set([model.draft, now, ...names].filter(Boolean))];
  const draft = h("select", { "data-key": `draft ${model.name}` }, h("option", { value: "" }, "None"));
  draft.append(...choices.map((name) => h("option", { value: name }, name)));
  draft.value = now ?? "";
  const heads = spec.heads.includes("paired") ? model.heads : spec.heads;
  const set = (changes) => {
    const { draft_model, heads } = modelSpec(model);
    ownSpecs[model.name] = { draft_model, heads, ...changes };
  };
  draft.onchange = () => set({ draft_model: draft.value || null });
  const title = "--draft-model; a smaller model of the same family";
  const parts = [h("label", { title }, "Draft model", draft)];
  const all = [...new Set([...model.heads, ...heads])];
  if (!all.length) return parts;
  const boxes = all.map((name) => {
    const checked = heads.includes(name);
    return h("input", { type: "checkbox", value: name, checked, "data-key": `heads ${model.name} ${name}` });
  });
  const meaning = "--heads; trained on this model, one for each method";
  const told = h("span", { class: "quiet", title: meaning }, "Drafting heads");
  const group = h("div", { class: "row", role: "group", "aria-label": "Drafting heads" }, told);
  group.append(...boxes.map((box) => h("label", {}, box, box.value)));
  group.onchange = () => set({ heads: boxes.filter((box) => box.checked).map((box) => box.value) });
  return [...parts, group];
}

async function applyChange({ n_ctx, kv_type, model }) {
  if (model) {
    openedModel = model;
    return showModels();
  }
  loadWith.n_ctx = n_ctx ?? loadWith.n_ctx;
  loadWith.kv_type = kv_type ?? loadWith.kv_type;
  $(".models input[type=number]").value = loadWith.n_ctx || "";
  $(".models .row select").value = loadWith.kv_type;
  await readModels();
}

const loadModel = tried(async (spec) => {
  await api("POST", "/models/load", { ...spec, ...loadWith });
  refreshModels();
}, modelError);

function confirmModelDelete({ name, title, is_here, shape, part }) {
  const takes = inSize(is_here ? shape.n_bytes : part.done);
  const question = is_here ? "Delete this model’s file?" : "Delete the part that was downloaded?";
  const text = `${title} takes ${takes} on disk. Deleting it cannot be undone.`;
  askWhether(question, text, "Delete", "Keep", async () => {
    const { freed } = await api("DELETE", "/models/files", { name });
    notify(`Deleted ${title}: ${inSize(freed)} are free again`);
  });
}

function askWhether(question, text, yes, no, action) {
  const act = tried(() => (dialog.close(), action()), modelError);
  const answers = [button(yes, act, { class: "primary" }), button(no, () => dialog.close())];
  const dialog = openDialog(question, h("p", {}, text), h("div", { class: "row answers" }, ...answers));
}

// A method needs something that is not loaded, and models.txt pairs it with the model.
export function offerMissing(method, { setting, offer }) {
  const { spec, name } = server.status.model;
  const load = () => {
    changeSettings({ method, parameters: {} });
    const { model, draft_model, heads, n_ctx, kv_type, exact } = spec;
    const beside = setting === "heads" ? { heads: [...heads, ...offer] } : { draft_model: offer[0] };
    loadWith = { n_ctx, kv_type, exact };
    return loadModel({ model, draft_model, heads, ...beside });
  };
  const text =
    `Load ${name} again with ${offer.join(", ")}? ` +
    "A file that is not on this machine is downloaded first.";
  askWhether(`The method ${titleOf(method)} needs ${NEEDS[setting]}`, text, "Load", "Not now", load);
}
