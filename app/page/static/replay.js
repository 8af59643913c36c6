// The replay of a reply's steps, in the drawer: each step's tree, who drafted, rows and times.
//
// A step is [draft_ms, decode_ms, accept_ms, rows, n_texts, nodes, path, bonus]; nodes are
// [parent, piece, source] with parent -1 for the root, and path has the numbers of the accepted ones.

import { $, h, icon, setText, tried } from "./dom.js";
import { api } from "./api.js";
import { focusInDrawer, openDrawer } from "./settings.js";
import { cellsOf } from "./transcript.js";

let replay = null; // { sources, steps, starts: ms before each step and in all, at, frame }

const FIRST = 400; // ms of the first step that are played: it also reads the end of the prompt
const piecesOf = ([, , , , , nodes, path, bonus]) => [...path.map((n) => nodes[n][1]), bonus];
const tokensOf = ([, , , , , , path, bonus]) => path.length + (bonus ? 1 : 0);
const msOf = ([draft, decode, accept]) => draft + decode + accept;

export async function openReplay(turn) {
  stopReplay();
  openDrawer("replay");
  $("#replayed").hidden = true;
  const opened = (replay = { starts: [0], at: 0, frame: 0 });
  await tried(
    async () => {
      Object.assign(opened, await api("GET", `/turns/${turn.id}/steps`));
      if (replay !== opened) return; // another one was opened meanwhile
      for (const one of opened.steps) opened.starts.push(opened.starts.at(-1) + msOf(one));
      $("#replayed").hidden = false;
      $("#scrubber").max = opened.steps.length - 1;
      $(".bars").replaceChildren(cellsOf(opened.steps.map((one) => [msOf(one), tokensOf(one)])), h("i"));
      showStep(0);
      requestAnimationFrame(() => focusInDrawer($("#scrubber")));
    },
    () => $("#replay-error"),
  )();
}

export function startReplay() {
  $("#scrubber").oninput = ({ target }) => showStep(Number(target.value));
  $("#back").onclick = () => showStep(replay.at - 1);
  $("#on").onclick = () => showStep(replay.at + 1);
  $("#play").onclick = play;
  $(".bars").onclick = ({ offsetX, currentTarget }) =>
    showStep(stepAt((offsetX / currentTarget.clientWidth) * replay.starts.at(-1)));
  showPlaying(false);
}

function stepAt(ms) {
  const at = replay.starts.findLastIndex((start) => start <= ms);
  return Math.min(Math.max(at, 0), replay.steps.length - 1);
}

function showStep(wanted) {
  const { steps, starts } = replay;
  const total = starts.at(-1);
  const at = Math.min(Math.max(wanted, 0), steps.length - 1);
  replay.at = at;
  const now = steps[at];
  const [draft, decode, accept, rows, nTexts, nodes, path] = now;
  const scrubber = $("#scrubber");
  scrubber.value = at;
  const n = tokensOf(now);
  const tokens = n === 1 ? "1 token" : `${n} tokens`;
  const drafts = nodes.length ? `, ${path.length} of ${nodes.length} drafts accepted` : "";
  const what = `Step ${at + 1} of ${steps.length}: ${tokens} in ${msOf(now).toFixed(1)} ms${drafts}`;
  scrubber.ariaValueText = what;
  const title = $("#step-title");
  // The scrubber announces its step itself, and while the replay plays there are too many.
  title.ariaLive = replay.frame || document.activeElement === scrubber ? "off" : "polite";
  setText(title, what);
  $(".bars i").style = `left: ${(starts[at] / total) * 100}%; width: ${(msOf(now) / total) * 100}%`;
  const before = steps.slice(0, at).flatMap(piecesOf).join("");
  const text = $("#so-far");
  text.replaceChildren(before.slice(-160), h("mark", piecesOf(now).join("")));
  text.scrollTop = text.scrollHeight;
  const none = at
    ? "No drafts in this step: the model wrote one token."
    : "No drafts in this step, which also reads the end of the prompt.";
  const tree = $("#tree");
  tree.replaceChildren(nodes.length ? treeOf(now) : h("p.quiet", none));
  const end = $("em", tree); // where the accepted drafts end
  tree.scrollLeft = end ? end.offsetLeft - tree.clientWidth / 2 : 0;
  const phases = Object.entries({ Draft: draft, Decode: decode, Accept: accept });
  const facts = phases.map(([name, ms]) => {
    const phase = name.toLowerCase();
    $(`.phases .${phase}`).style.flexGrow = ms;
    return h("li", { class: phase }, `${name} ${ms.toFixed(2)} ms`);
  });
  const shared = nTexts > 1 ? `, shared by ${nTexts} replies` : "";
  facts.push(h("li", `${rows === 1 ? "1 row" : `${rows} rows`} in the batch${shared}`));
  $("#phases").replaceChildren(...facts);
}

// The tree as nested lists, which CSS lays out from left to right. Struck through: not accepted.
function treeOf([, , , , , nodes, path, bonus]) {
  const below = (parent) => {
    const list = h("ul");
    nodes.forEach(([above, piece, source], n) => {
      if (above !== parent) return;
      const isAccepted = path.includes(n);
      const node = h(isAccepted ? "b" : "del", { dir: "auto" }, ...shown(piece));
      const said = h("span.unseen", isAccepted ? "accepted" : "rejected");
      const by = nodes[parent]?.[2] !== source && h("small", replay.sources[source]);
      list.append(h("li", by, h("span.node", node, said), below(n)));
    });
    if (bonus && parent === (path.at(-1) ?? -1)) {
      const node = h("span.node", h("em", { dir: "auto" }, ...shown(bonus)));
      list.prepend(h("li", h("small", "model"), node));
    }
    return list.firstChild ? list : "";
  };
  return below(-1);
}

// What is invisible has a mark, and a name for screen readers; else its code is both.
const INVISIBLE = { " ": ["␣", "space"], "\n": ["↵", "new line"], "\t": ["→", "tab"] };
const codeOf = (one) => `U+${one.codePointAt().toString(16).toUpperCase().padStart(4, "0")}`;

function shown(piece) {
  if (/[^\p{Cc}\p{Cf}\p{Z}]/u.test(piece || "∅")) return [piece.replaceAll("\n", "↵") || "∅"];
  const found = [...piece].map((one) => INVISIBLE[one] ?? Array(2).fill(codeOf(one)));
  const names = new Set(found.map(([, name]) => name));
  const marks = h("span", { "aria-hidden": "true" }, found.map(([mark]) => mark).join(""));
  return [marks, h("span.unseen", [...names].join(", "))];
}

function play() {
  if (replay.frame) return stopReplay();
  const { starts } = replay;
  const last = replay.steps.length - 1;
  if (replay.at === last) showStep(0);
  showPlaying(true);
  let { at } = replay;
  let ms = at ? starts[at] : Math.max(0, starts[1] - FIRST);
  let before = performance.now();
  const tick = (now) => {
    if (at !== replay.at) ms = starts[(at = replay.at)]; // the user went there
    ms += (now - before) / Number($("#slow").value);
    before = now;
    if (ms >= starts.at(-1)) {
      showStep(last);
      return stopReplay();
    }
    if (at !== stepAt(ms)) showStep((at = stepAt(ms)));
    replay.frame = requestAnimationFrame(tick);
  };
  replay.frame = requestAnimationFrame(tick);
}

export function stopReplay() {
  if (!replay?.frame) return;
  cancelAnimationFrame(replay.frame);
  replay.frame = 0;
  showPlaying(false);
}

function showPlaying(isPlaying) {
  const button = $("#play");
  button.replaceChildren(icon(isPlaying ? "pause" : "play"));
  button.ariaLabel = button.title = isPlaying ? "Pause" : "Play";
}
