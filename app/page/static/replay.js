// The replay of a reply's steps, in the drawer: each step's tree, who drafted, rows and times.
//
// A step is [draft_ms, decode_ms, accept_ms, rows, n_texts, nodes, path, bonus]; nodes are
// [parent, piece, source] with parent -1 for the root, and path has the numbers of the accepted ones.

let replay = null; // { sources, steps, starts: ms before each step and in all, at, frame }

const FIRST = 400; // ms of the first step that are played: it also reads the end of the prompt
const SLOW = [
  [1, "as it was"],
  [4, "¼ as fast"],
  [16, "1⁄16 as fast"],
];
const piecesOf = ([, , , , , nodes, path, bonus]) => [...path.map((n) => nodes[n][1]), bonus];
const tokensOf = (one) => one[6].length + (one[7] ? 1 : 0);
const msOf = ([draft, decode, accept]) => draft + decode + accept;

async function openReplay(turn) {
  stopReplay();
  openDrawer("replay");
  const place = $("#replay");
  place.replaceChildren(h("p", { class: "quiet" }, "Reading the steps"));
  const opened = (replay = { starts: [0], at: 0, frame: 0 });
  try {
    Object.assign(opened, await api("GET", `/turns/${turn.id}/steps`));
  } catch (error) {
    if (replay === opened) place.replaceChildren(h("p", { class: "error", role: "alert" }, error.message));
    return;
  }
  if (replay !== opened) return; // another one was opened meanwhile
  for (const one of replay.steps) replay.starts.push(replay.starts.at(-1) + msOf(one));
  showReplay(place);
  showStep(0);
  requestAnimationFrame(() => focusInDrawer($("#scrubber")));
}

function stepAt(ms) {
  const at = replay.starts.findLastIndex((start) => start <= ms);
  return Math.min(Math.max(at, 0), replay.steps.length - 1);
}

function showReplay(place) {
  const { steps } = replay;
  const range = { type: "range", min: 0, max: steps.length - 1, value: 0 };
  const scrubber = h("input", { id: "scrubber", "aria-label": "Step", ...range });
  scrubber.oninput = () => showStep(Number(scrubber.value));
  const bars = h("div", { class: "bars" }, cellsOf(steps.map((one) => [msOf(one), tokensOf(one)])), h("i"));
  bars.onclick = ({ offsetX }) => showStep(stepAt((offsetX / bars.clientWidth) * replay.starts.at(-1)));
  const slow = h("select", { id: "slow", "aria-label": "Speed" });
  for (const [value, text] of SLOW) slow.append(h("option", { value }, text));
  slow.value = 4;
  place.replaceChildren(
    h("p", { class: "quiet" }, "Tokens a step over the time of the reply. Click to go there."),
    bars,
    h(
      "div",
      { class: "row controls" },
      iconButton("left", "Previous step", () => showStep(replay.at - 1)),
      iconButton("play", "Play", play, { id: "play" }),
      iconButton("right", "Next step", () => showStep(replay.at + 1)),
      scrubber,
      slow,
    ),
    h("p", { id: "step-title" }),
    h("p", { id: "so-far", dir: "auto", tabindex: 0, role: "group", "aria-label": "The text so far" }),
    h("div", { id: "tree", tabindex: 0, role: "group", "aria-label": "Drafts of this step" }),
    h("div", { id: "phases" }),
  );
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
  const mark = $(".bars i");
  mark.style.left = `${(starts[at] / total) * 100}%`;
  mark.style.width = `${(msOf(now) / total) * 100}%`;
  const before = steps.slice(0, at).flatMap(piecesOf).join("");
  const text = $("#so-far");
  text.replaceChildren(before.slice(-160), h("mark", {}, piecesOf(now).join("")));
  text.scrollTop = text.scrollHeight;
  const none = at
    ? "No drafts in this step: the model wrote one token."
    : "No drafts in this step, which also reads the end of the prompt.";
  const tree = $("#tree");
  tree.replaceChildren(nodes.length ? treeOf(now) : h("p", { class: "quiet" }, none));
  const end = $("em", tree); // where the accepted drafts end
  tree.scrollLeft = end ? end.offsetLeft - tree.clientWidth / 2 : 0;
  const phases = [
    ["Draft", draft],
    ["Decode", decode],
    ["Accept", accept],
  ];
  const bar = h("div", { class: "phases", "aria-hidden": "true" });
  phases.forEach(([name, ms]) =>
    bar.append(h("i", { class: name.toLowerCase(), style: `flex-grow: ${ms}` })),
  );
  const facts = phases.map(([name, ms]) =>
    h("li", { class: name.toLowerCase() }, `${name} ${ms.toFixed(2)} ms`),
  );
  const shared = nTexts > 1 ? `, shared by ${nTexts} replies` : "";
  facts.push(h("li", {}, `${rows === 1 ? "1 row" : `${rows} rows`} in the batch${shared}`));
  $("#phases").replaceChildren(bar, h("ul", {}, ...facts));
}

// The tree as nested lists, which CSS lays out from left to right. Struck through: not accepted.
function treeOf([, , , , , nodes, path, bonus]) {
  const below = (parent) => {
    const list = h("ul");
    nodes.forEach(([above, piece, source], n) => {
      if (above !== parent) return;
      const isAccepted = path.includes(n);
      const isNew = parent < 0 || nodes[parent][2] !== source;
      const by = h("small", {}, (isNew && replay.sources[source]) || "\u00a0");
      const node = h(isAccepted ? "b" : "del", { dir: "auto" }, shown(piece));
      const said = h("span", { class: "unseen" }, isAccepted ? "accepted" : "rejected");
      list.append(h("li", {}, h("span", { class: "node" }, by, node, said), below(n)));
    });
    const last = path.at(-1) ?? -1;
    if (parent === last && bonus) {
      const node = h(
        "span",
        { class: "node" },
        h("small", {}, "model"),
        h("em", { dir: "auto" }, shown(bonus)),
      );
      list.prepend(h("li", {}, node));
    }
    return list.firstChild ? list : "";
  };
  return below(-1);
}

// A piece of text with its spaces and line ends made visible.
const shown = (piece) => piece.replaceAll("\n", "↵").replaceAll(" ", "\u00a0") || "∅";

function play() {
  if (replay.frame) return stopReplay();
  const { starts } = replay;
  const last = replay.steps.length - 1;
  if (replay.at === last) showStep(0);
  showButton("pause", "Pause");
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

function stopReplay() {
  if (!replay?.frame) return;
  cancelAnimationFrame(replay.frame);
  replay.frame = 0;
  showButton("play", "Play");
}

function showButton(name, label) {
  const button = $("#play");
  button.replaceChildren(icon(name));
  button.ariaLabel = button.title = label;
}
