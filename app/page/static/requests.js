// What the server does: the last requests for text, what a step costs, and what auto makes of that.

import { h, openDialog, render, svg, tried } from "./dom.js";
import { api } from "./api.js";

const EVERY_MS = 1000; // while the dialog is open
const HEADS = ["Time", "Request", "Client", "Model", "Prompt", "Cached", "Tokens", "Tokens/s", "Drafted", "End"];

export async function openRequests() {
  const error = h("p", { class: "error", role: "alert", hidden: true });
  const box = h("div", {}, h("p", { class: "quiet" }, "Asking the server…"));
  const dialog = openDialog("Requests", "requests", error, box);
  const show = tried(
    async () => render(box, ...shown(await api("GET", "/requests"))),
    () => error,
  );
  while (dialog.isConnected) {
    if (!document.hidden) await show();
    await new Promise((done) => setTimeout(done, EVERY_MS));
  }
}

function shown({ requests, drafting }) {
  const head = h("thead", {}, h("tr", {}, ...HEADS.map((text) => h("th", { scope: "col" }, text))));
  const table = h("table", {}, head, h("tbody", {}, ...requests.map(row)));
  const none = h("p", { class: "quiet" }, "No requests for text yet.");
  return [
    requests.length ? h("div", { class: "sheet", tabindex: 0, role: "group", "aria-label": "Requests" }, table) : none,
    ...(drafting ? [...costs(drafting), ...choices(drafting)] : []),
  ];
}

function row({ at, route, client, model, n_prompt, n_reused, n_tokens, n_accepted, per_second, end, is_running }) {
  const share = n_tokens ? `${Math.round((100 * n_accepted) / n_tokens)} %` : "";
  const time = new Date(at * 1000).toLocaleTimeString();
  const cells = [time, route, client, model, n_prompt, n_reused, n_tokens, per_second || "", share, end];
  return h("tr", { class: is_running && "running" }, ...cells.map((value) => h("td", {}, value.toLocaleString())));
}

// The cost curve.
function costs({ decode_ms }) {
  const most = Math.max(...decode_ms);
  const points = decode_ms.map((ms, n) => `${(300 * n) / decode_ms.length},${80 - (76 * ms) / most}`).join(" ");
  const some = [1, 2, 4, 8, 16, 64].map((rows) => `${rows}: ${decode_ms[rows - 1].toFixed(1)} ms`);
  return [
    h("h3", {}, "What a step costs"),
    svg("svg", { class: "curve", "aria-hidden": "true", viewBox: "0 0 300 82" }, svg("polyline", { points })),
    h("p", { class: "quiet" }, `By the tokens that it checks: ${some.join(", ")}`),
  ];
}

function choices({ pays_from: least, sources }) {
  const pays = least > 100 ? "No drafts pay here." : `Drafts pay if each is accepted with ${least} % or more.`;
  const lines = sources.map(([source, tokens, ms, gain, tells]) => {
    const asked = gain > 0 ? `asked: gains ${gain.toFixed(1)} ms` : `only tried: loses ${(-gain).toFixed(1)} ms`;
    const figures = `A draft takes ${ms.toFixed(1)} ms and brings ${tokens.toFixed(1)} tokens.`;
    return h("li", {}, h("b", {}, source), `: ${tells ? "asked where it is that likely" : asked}. ${figures}`);
  });
  return [h("h3", {}, "What auto does"), h("p", { class: "quiet" }, pays), h("ul", { class: "quiet" }, ...lines)];
}
