// The server: calls of its routes, and the stream of what has changed.

import { $, setText } from "./dom.js";

export async function api(method, path, body) {
  const options = { method, headers: {} };
  if (body !== undefined) {
    options.body = typeof body === "string" || body instanceof Blob ? body : JSON.stringify(body);
    options.headers["Content-Type"] = "application/json";
  }
  if (method !== "GET") listen(); // what comes of it is told there
  let response;
  try {
    response = await fetch(`page${path}`, options);
  } catch (cause) {
    throw new Error("The server does not answer. Check that it is running, then try again.", { cause });
  }
  const text = await response.text();
  if (response.ok) return text ? JSON.parse(text) : null;
  let error = {};
  try {
    ({ error } = JSON.parse(text));
  } catch {} // not one of the server's own answers
  if (error.param) document.dispatchEvent(new CustomEvent("refused", { detail: error.param }));
  throw new Error(error.message ?? `The server answered with status ${response.status}.`);
}

export const listeners = {}; // by the kind of event
let lastId = ""; // of the last event, from which the next stream goes on
let stream = null;
export const goOnAfter = (seq) => (lastId = String(seq));

// Asks, and shows the answer before what the stream tells meanwhile.
let shown = Promise.resolve(); // once all answers are shown
export function showFirst(ask) {
  const asked = ask();
  shown = Promise.allSettled([shown, asked]);
  return asked;
}

// A browser opens six connections to a server. So hidden tabs have no stream, and of those in view only the
// ones used last do.
const MOST_STREAMS = 4;
const tabs = new BroadcastChannel("speculation");
const me = Math.random();
const usedSince = new Set(); // the tabs used since this one
tabs.onmessage = ({ data }) => {
  usedSince.add(data);
  if (usedSince.size >= MOST_STREAMS) hangUp();
};

export const OFFLINE = "No connection to the server. The page tries again by itself.";
export const AGAIN_MS = 2000;

let hasBegun = false;
export function beginToListen() {
  hasBegun = true;
  listen();
}

function listen() {
  if (document.hidden || !hasBegun) return;
  usedSince.clear();
  tabs.postMessage(me);
  if (stream) return;
  stream = new EventSource(`page/events?after=${lastId}`);
  for (const [kind, listener] of Object.entries(listeners)) {
    stream.addEventListener(kind, (event) => {
      lastId = event.lastEventId || lastId;
      const seq = Number(event.lastEventId);
      shown.then(() => listener({ ...JSON.parse(event.data || "{}"), seq }));
    });
  }
  stream.onopen = () => setText($("#offline"), "");
  stream.onerror = () => {
    setText($("#offline"), OFFLINE);
    if (stream?.readyState !== EventSource.CLOSED) return; // the browser tries again
    hangUp();
    setTimeout(listen, AGAIN_MS);
  };
}

function hangUp() {
  stream?.close();
  stream = null;
}

document.addEventListener("visibilitychange", () => (document.hidden ? hangUp() : listen()));
window.addEventListener("focus", listen);
window.addEventListener("pageshow", listen);
window.addEventListener("pagehide", hangUp);
