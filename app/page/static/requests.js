// What the server does: the last requests for text, what a step costs, and what auto makes of that.

import { button, h, openDialog, render, svg, tried } from "./dom.js";
import { api } from "./api.js";

const EVERY_MS = 1000; // while the dialog is open
const HEADS = ["Time", "Request", "Client", "Model", "Prompt", "Cached", "Tokens", "Tokens/s", "Drafted", "End"];
const KEEP = "Keep the texts of your requests from now on: in memory, until you switch it off or the server ends";
const box = h("div");
const texts = new Map(); // those that are shown, by the request's id

const show = tried(async () => render(box, ...shown(await api("GET", "/requests"))));

export async function openRequests() {
  texts.clear();
  box.replaceChildren(h("p.quiet", "Asking the server…"));
  const dialog = openDialog("Requests", "requests", box);
  while (dialog.isConnected) {
    if (!document.hidden) await show();
    await new Promise((done) => setTimeout(done, EVERY_MS));
  }
}

function shown({ requests, drafting, keeps_texts }) {
  const head = h("thead", h("tr", ...HEADS.map((text) => h("th", { scope: "col" }, text))));
  const table = h("table", head, h("tbody", ...requests.flatMap(rows)));
  const none = h("p.quiet", "No requests for text yet.");
  const onchange = tried(({ target }) => api("POST", "/requests/texts", { keeps: target.checked }));
  const keep = h("input", { type: "checkbox", checked: keeps_texts, onchange });
  return [
    requests.length ? h("div.sheet", { tabindex: 0, role: "group", "aria-label": "Requests" }, table) : none,
    h("label.quiet", keep, KEEP),
    ...(drafting ? [...costs(drafting), ...choices(drafting)] : []),
  ];
}

// A request's row, and one with its texts if they are shown.
function rows({ id, at, route, client, model, n_prompt, n_reused, n_tokens, n_accepted, per_second, end, ...more }) {
  const share = n_tokens ? `${Math.round((100 * n_accepted) / n_tokens)} %` : "";
  const time = new Date(at * 1000).toLocaleTimeString();
  const toggle = tried(async () => {
    if (!texts.delete(id)) texts.set(id, await api("GET", `/requests/${id}`));
    await show();
  });
  const first = more.has_texts ? button(time, toggle, { "aria-expanded": String(texts.has(id)) }) : time;
  const cells = [route, client, model, n_prompt, n_reused, n_tokens, per_second || "", share, end];
  const tds = [first, ...cells.map((value) => value.toLocaleString())].map((value) => h("td", value));
  const row = h("tr", { id: `request-${id}`, class: more.is_running && "running" }, ...tds);
  const { prompt, reply } = texts.get(id) ?? {};
  const parts = Object.entries({ Prompt: prompt, Reply: reply }).flatMap(([name, text]) => [
    h("h3", name),
    h("pre", { tabindex: 0, dir: "auto", "aria-label": name, role: "group" }, text || "Not known"),
  ]);
  return [row, texts.has(id) && h("tr", { id: `texts-${id}` }, h("td", { colspan: HEADS.length }, ...parts))];
}

// The cost curve.
function costs({ decode_ms }) {
  const most = Math.max(...decode_ms);
  const points = decode_ms.map((ms, n) => `${(300 * n) / decode_ms.length},${80 - (76 * ms) / most}`).join(" ");
  const some = [1, 2, 4, 8, 16, 64].map((rows) => `${rows}: ${decode_ms[rows - 1].toFixed(1)} ms`);
  return [
    h("h3", "What a step costs"),
    svg("svg.curve", { "aria-hidden": "true", viewBox: "0 0 300 82" }, svg("polyline", { points })),
    h("p.quiet", `By the tokens that it checks: ${some.join(", ")}`),
  ];
}

function choices({ pays_from: least, sources }) {
  const pays = least > 100 ? "No drafts pay here." : `Drafts pay if each is accepted with ${least} % or more.`;
  const lines = sources.map(([source, tokens, ms, gain, tells]) => {
    const asked = gain > 0 ? `asked: gains ${gain.toFixed(1)} ms` : `only tried: loses ${(-gain).toFixed(1)} ms`;
    const figures = `A draft takes ${ms.toFixed(1)} ms and brings ${tokens.toFixed(1)} tokens.`;
    return h("li", h("b", source), `: ${tells ? "asked where it is that likely" : asked}. ${figures}`);
  });
  return [h("h3", "What auto does"), h("p.quiet", pays), h("ul.quiet", ...lines)];
}
