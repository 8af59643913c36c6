// The models: what is on this machine, what models.txt names, and any GGUF of the Hub. See docs/page_routes.md.

let found = null; // as GET page/models says, while the dialog is open
let hub = null; // as GET page/models/hub says
let openedModel = ""; // whose details are shown
let asked = { n_ctx: 0, kv_type: "f16" }; // what the models are to be loaded with
const chosen = {}; // of each model: { draft_model, heads }

const inSize = (bytes) => (bytes < 1e9 ? `${Math.round(bytes / 1e6)} MB` : `${(bytes / 1e9).toFixed(1)} GB`);
const askedQuery = () => `n_ctx=${asked.n_ctx}&kv_type=${asked.kv_type}`;
const modelsBox = () => $("#models");

async function openModels() {
  const spec = server.status?.model?.spec;
  if (spec) {
    asked = { n_ctx: spec.n_ctx, kv_type: spec.kv_type };
    openedModel = spec.model;
    chosen[spec.model] = { draft_model: spec.draft_model, heads: spec.heads };
  }
  const n_ctx = h("input", { type: "number", min: 0, step: 256, value: asked.n_ctx || "", placeholder: "own" });
  const kv_type = h("select", {}, ...["f16", "q8_0", "f32"].map((type) => h("option", {}, type)));
  kv_type.value = asked.kv_type;
  const change = tried(async () => {
    asked = { n_ctx: Math.max(0, Math.round(Number(n_ctx.value) || 0)), kv_type: kv_type.value };
    await readModels();
    if (hub) await readHub(hub.repo);
  }, modelError);
  n_ctx.onchange = kv_type.onchange = change;
  const repo = h("input", { "aria-label": "Repository on the Hub", placeholder: "owner/repository on the Hub" });
  const search = h("form", {}, repo, h("button", {}, "List files"));
  search.onsubmit = (event) => {
    event.preventDefault();
    tried(() => readHub(repo.value), modelError)();
  };
  const path = h("input", { "aria-label": "Path or name of a model", placeholder: "Path of a .gguf file" });
  const byPath = h("form", {}, path, h("button", {}, "Load"));
  byPath.onsubmit = (event) => {
    event.preventDefault();
    if (path.value.trim()) loadModel({ model: path.value, draft_model: null, heads: [] });
  };
  const dialog = openDialog(
    "Models",
    h("p", { class: "quiet", id: "computed-by" }),
    h(
      "div",
      { class: "row" },
      h("label", { title: "--ctx: in tokens; empty: the model's own, up to 8,192" }, "Context", n_ctx, "tokens"),
      h("label", { title: "--kv-type: q8_0 takes half the memory of f16" }, "KV cache", kv_type),
    ),
    h("p", { class: "error", id: "models-error", role: "alert", hidden: true }),
    h("div", { id: "models" }, h("p", { class: "quiet" }, "Reading the models…")),
    h("h3", {}, "Other models"),
    h("div", { class: "row" }, search, byPath),
    h("div", { id: "hub" }),
  );
  dialog.classList.add("wide", "models");
  dialog.addEventListener("close", () => (found = hub = null));
  await tried(readModels, modelError)();
}

const modelError = () => $("#models-error") ?? $("#alert");

async function readModels() {
  const read = await api("GET", `/models?${askedQuery()}`);
  if (!modelsBox()) return;
  found = read;
  showModels();
}

async function readHub(repo) {
  $("#hub").replaceChildren(h("p", { class: "quiet" }, "Asking the Hub…"));
  try {
    hub = await api("GET", `/models/hub?repo=${encodeURIComponent(repo)}&${askedQuery()}`);
  } catch (error) {
    hub = null;
    throw error;
  } finally {
    showModels();
  }
}

let refreshing = 0;
function refreshModels() {
  if (!modelsBox()) return;
  clearTimeout(refreshing);
  refreshing = setTimeout(tried(readModels, modelError), 200);
}

listeners.models = ({ transfer, measuring, error }) => {
  if (error) setText(modelError(), error);
  if (!modelsBox() || !found) return;
  if (measuring !== undefined) found.is_measuring = !!measuring;
  if (transfer && transfer.state !== "done") {
    for (const one of [...found.models, ...(hub?.models ?? [])]) {
      if (one.name === transfer.name) one.transfer = transfer;
    }
    return showModels();
  }
  if (transfer && hub) tried(() => readHub(hub.repo), modelError)();
  refreshModels();
};

function showModels() {
  if (!found || !modelsBox()) return;
  const focused = document.activeElement?.dataset?.key;
  setText($("#computed-by"), found.computed_by);
  const groups = [
    ["On this machine", found.models.filter((one) => one.is_here)],
    ["Known", found.models.filter((one) => !one.is_here)],
  ];
  modelsBox().replaceChildren(...groups.flatMap(([title, models]) => groupOf(title, models)));
  $("#hub").replaceChildren(...(hub ? groupOf(`Hub: ${hub.repo}`, hub.models) : []));
  if (focused) $(`.models [data-key="${CSS.escape(focused)}"]`)?.focus();
}

function groupOf(title, models) {
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
  const name = h(
    "button",
    { type: "button", class: "name", "aria-expanded": String(isOpen), onclick: open, "data-key": `name ${model.name}` },
    h("b", {}, model.title),
    h("span", { class: "quiet" }, ...factsOf(model)),
  );
  const row = h("li", { class: "model" }, h("div", { class: "head" }, name, ...actionsOf(model)));
  const { transfer } = model;
  if (transfer && transfer.state !== "done") row.append(...transferOf(transfer));
  if (isOpen) row.append(detailsOf(model));
  return row;
}

function factsOf({ shape, fit, speeds, is_here }) {
  const facts = [
    shape.n_bytes && inSize(shape.n_bytes),
    shape.size_label,
    shape.file_type,
    shape.n_ctx_train && `${shape.n_ctx_train.toLocaleString("en")} tokens`,
    is_here && !shape.has_template && "no chat template",
  ].filter(Boolean);
  const [mark, text] = fit?.fits ? ["fits", "fits"] : fit?.fits === false ? ["too-large", "too large"] : ["", ""];
  const speed = speeds.auto ?? speeds.plain;
  const parts = [facts.join(" · ")];
  if (text) parts.push(parts[0] ? " · " : "", h("span", { class: mark }, text));
  if (speed) parts.push(` · ${Math.round(speed)} tokens/s`);
  return parts;
}

function actionsOf(model) {
  const { name, transfer } = model;
  const act = (label, action, attributes = {}) =>
    h(
      "button",
      { type: "button", onclick: tried(action, modelError), "aria-label": `${label}: ${model.title}`, "data-key": `${label} ${name}`, ...attributes },
      label,
    );
  const loading = server.status?.loading;
  if (loading?.model === name) return [act("Cancel", () => api("DELETE", "/models/load"))];
  if (transfer && ["running", "waiting"].includes(transfer.state)) {
    return [act(transfer.file_type ? "Cancel" : "Pause", () => api("POST", "/models/pause", { name }))];
  }
  if (model.is_loaded) return [h("span", { class: "quiet" }, "loaded")];
  if (model.is_here) return [act("Load", () => loadModel(specOf(model)), { class: "primary" })];
  if (!model.can_download) return [];
  const label = transfer?.state === "paused" ? "Resume" : "Download";
  return [act(label, () => api("POST", "/models/download", { name }))];
}

function transferOf({ state, done, total, error, file_type }) {
  const what = file_type ? `Converting to ${file_type}` : "Downloading";
  const much = total ? `: ${inSize(done)} of ${inSize(total)}` : "";
  if (state === "failed") return [h("p", { class: "error", role: "alert" }, error)];
  if (file_type && state === "paused") return [];
  const text =
    state === "waiting" ? "Waits for another transfer"
    : state === "paused" ? `Paused${much}`
    : total && done === total ? "Checking the file"
    : `${what}${much}`;
  const bar = h("progress", total ? { max: total, value: done, "aria-label": what } : { "aria-label": what });
  return [h("p", { class: "quiet" }, text), ...(state === "waiting" ? [] : [bar])];
}

// What a model is loaded with: its own choice, else what models.txt pairs if the loaded one has such.
function specOf(model) {
  const before = server.status?.model?.spec;
  const usual = {
    draft_model: before?.draft_model && model.draft ? model.draft : null,
    heads: before?.heads?.length ? model.heads : [],
  };
  return { model: model.name, ...usual, ...chosen[model.name] };
}

function detailsOf(model) {
  const { name, shape, fit, speeds, faster } = model;
  const line = (text) => text && h("p", { class: "quiet" }, text);
  const button = (label, action, key = label) =>
    h("button", { type: "button", onclick: tried(action, modelError), "data-key": `${key} ${name}` }, label);
  const form = [
    shape.architecture,
    shape.n_layer && `${shape.n_layer} layers`,
    shape.n_head_kv && `${shape.n_head_kv} KV heads`,
    shape.n_layer && (shape.has_template ? "chat template" : "no chat template: it continues texts"),
  ].filter(Boolean);
  const measured = [
    speeds.prompt && `reads ${Math.round(speeds.prompt)} tokens/s`,
    speeds.plain && `plain ${Math.round(speeds.plain)} tokens/s`,
    speeds.auto && `auto ${Math.round(speeds.auto)} tokens/s`,
  ].filter(Boolean);
  const changes = (fit?.changes ?? []).map((change) => button(change.text, () => applyChange(change), change.text));
  const otherFiles = fit?.fits === false && model.repo && !hub && button("See other quantisations", () => readHub(model.repo));
  const row = [
    model.is_loaded && button(found.is_measuring ? "Measuring…" : "Measure now", measureModel),
    model.is_loaded && button("Load again", () => loadModel(specOf(model))),
    faster && button(`Convert to ${faster.file_type}`, () => convertModel(model)),
    model.can_delete && button("Delete…", () => confirmDelete(model)),
  ].filter(Boolean);
  return h(
    "div",
    { class: "more" },
    ...[
      line(model.description),
      line(form.join(" · ")),
      line(fit?.sentence),
      changes.length || otherFiles ? h("div", { class: "row" }, ...changes, otherFiles) : null,
      line(measured.length ? `Measured here: ${measured.join(", ")}` : model.is_loaded && "Not measured here yet"),
      faster && line(`${shape.file_type} reads prompts more slowly here than ${faster.file_type}, about half as fast. The converted file takes ${inSize(faster.n_bytes)} more on disk.`),
      model.trouble && h("p", { class: model.is_here ? "error" : "quiet" }, model.trouble),
      ...besideOf(model),
      row.length ? h("div", { class: "row" }, ...row) : null,
    ].filter(Boolean),
  );
}

// Draft model and heads, where models.txt or the loaded model has some.
function besideOf(model) {
  if (!model.is_here) return [];
  const spec = specOf(model);
  const names = found.models.map((one) => one.name).filter((name) => name !== model.name);
  const now = spec.draft_model === "paired" ? model.draft : spec.draft_model;
  const choices = [...new Set([model.draft, now, ...names].filter(Boolean))];
  const draft = h("select", { "data-key": `draft ${model.name}` }, h("option", { value: "" }, "None"), ...choices.map((name) => h("option", { value: name }, name)));
  draft.value = now ?? "";
  const heads = spec.heads.includes("paired") ? model.heads : spec.heads;
  const set = (changes) => (chosen[model.name] = { draft_model: spec.draft_model, heads: spec.heads, ...chosen[model.name], ...changes });
  draft.onchange = () => set({ draft_model: draft.value || null });
  const parts = [h("label", { title: "--draft-model: a smaller model of the same family" }, "Draft model", draft)];
  const all = [...new Set([...model.heads, ...heads])];
  if (all.length) {
    const boxes = all.map((name) => {
      const box = h("input", { type: "checkbox", value: name, checked: heads.includes(name), "data-key": `heads ${name}` });
      box.onchange = () => set({ heads: $$("input", group).filter((one) => one.checked).map((one) => one.value) });
      return h("label", {}, box, name);
    });
    const group = h("div", { class: "row", role: "group", "aria-label": "Drafting heads" }, h("span", { class: "quiet" }, "Drafting heads"), ...boxes);
    parts.push(group);
  }
  return parts;
}

async function applyChange({ n_ctx, kv_type, model }) {
  if (model) {
    openedModel = model;
    return showModels();
  }
  asked = { n_ctx: n_ctx ?? asked.n_ctx, kv_type: kv_type ?? asked.kv_type };
  $(".models input[type=number]").value = asked.n_ctx || "";
  $(".models .row select").value = asked.kv_type;
  await readModels();
}

const loadModel = tried(async (spec) => {
  await api("POST", "/models/load", { ...spec, ...asked });
  refreshModels();
}, modelError);

async function measureModel() {
  if (found.is_measuring) return;
  found.is_measuring = true;
  showModels();
  await api("POST", "/models/measure");
}

const convertModel = ({ name }) => api("POST", "/models/convert", { name });

function confirmDelete({ name, title, shape }) {
  const dialog = openDialog(
    "Delete this model’s file?",
    h("p", {}, `${title} takes ${inSize(shape.n_bytes)} on disk. Deleting it cannot be undone.`),
    h(
      "div",
      { class: "row stage" },
      h(
        "button",
        {
          type: "button",
          class: "primary",
          onclick: tried(async () => {
            dialog.close();
            const { freed } = await api("DELETE", "/models/files", { name });
            notify(`Deleted ${title}: ${inSize(freed)} are free again`);
          }, modelError),
        },
        "Delete",
      ),
      h("button", { type: "button", onclick: () => dialog.close() }, "Keep"),
    ),
  );
}

// A method needs something that is not loaded, and models.txt pairs it with the model.
function offerMissing(method, { setting, offer }) {
  const { spec, name } = server.status.model;
  const load = () => {
    dialog.close();
    changeSettings({ method, parameters: {} });
    const { model, draft_model, heads, n_ctx, kv_type } = spec;
    const beside = setting === "heads" ? { heads: [...heads, ...offer] } : { draft_model: offer[0] };
    asked = { n_ctx, kv_type };
    loadModel({ model, draft_model, heads, ...beside });
  };
  const text = `Load ${name} again with ${offer.join(", ")}? A file that is not on this machine is downloaded first.`;
  const dialog = openDialog(
    `${titleOf(method)} needs ${NEEDS[setting]}`,
    h("p", {}, text),
    h(
      "div",
      { class: "row stage" },
      h("button", { type: "button", class: "primary", onclick: load }, "Load"),
      h("button", { type: "button", onclick: () => dialog.close() }, "Not now"),
    ),
  );
}
