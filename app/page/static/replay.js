// The replay of a reply's steps, in the drawer: each step's tree, who drafted, rows and times.
//
// A step is [draft_ms, decode_ms, accept_ms, rows, n_texts, nodes, path, bonus]; nodes are
// [parent, piece, source] with parent -1 for the root, and path has the numbers of the accepted ones.

let replay = null; // { sources, steps, starts, total, at, timer }

const SLOWEST = 400; // ms at most that a step is shown for, times the slowness
const LEAST_SHOWN = 40;
const piecesOf = ([, , , , , nodes, path, bonus]) => [...path.map((n) => nodes[n][1]), bonus];
const tokensOf = ([, , , , , , path, bonus]) => path.length + (bonus ? 1 : 0);
const msOf = ([draft, decode, accept]) => draft + decode + accept;

async function openReplay(turn) {
  openDrawer("replay");
  $("#replayed").hidden = true;
  await tried(
    async () => {
      const { sources, steps } = await api("GET", `/turns/${turn.id}/steps`);
      let total = 0;
      const starts = steps.map((one) => (total += msOf(one)) - msOf(one));
      replay = { sources, steps, starts, total, at: 0, timer: 0 };
      $("#replayed").hidden = false;
      $("#scrubber").max = steps.length - 1;
      $(".bars").replaceChildren(cellsOf(steps.map((one) => [msOf(one), tokensOf(one)])), h("i"));
      showStep(0);
    },
    () => $("#replay-error"),
  )();
}

function startReplay() {
  $("#scrubber").oninput = ({ target }) => showStep(Number(target.value));
  $("#back").onclick = () => showStep(replay.at - 1);
  $("#on").onclick = () => showStep(replay.at + 1);
  $("#play").onclick = () => (replay.timer ? stopReplay() : play());
  $(".bars").onclick = ({ offsetX, currentTarget }) => {
    const ms = (offsetX / currentTarget.clientWidth) * replay.total;
    showStep(replay.starts.findLastIndex((start) => start <= ms));
  };
  showPlaying(false);
}

function showStep(wanted) {
  const { steps, starts, total } = replay;
  const at = Math.min(Math.max(wanted, 0), steps.length - 1);
  replay.at = at;
  const now = steps[at];
  const [draft, decode, accept, rows, nTexts, nodes] = now;
  const n = tokensOf(now);
  const tokens = n === 1 ? "1 token" : `${n} tokens`;
  const what = `Step ${at + 1} of ${steps.length}: ${tokens} in ${msOf(now).toFixed(1)} ms`;
  $("#scrubber").value = at;
  $("#scrubber").ariaValueText = what;
  setText($("#step-title"), what);
  $(".bars i").style = `left: ${(starts[at] / total) * 100}%; width: ${(msOf(now) / total) * 100}%`;
  const before = steps.slice(0, at).flatMap(piecesOf).join("");
  $("#so-far").replaceChildren(before.slice(-160), h("mark", {}, piecesOf(now).join("")));
  const none = at
    ? "No drafts in this step: the model wrote one token."
    : "No drafts in this step, which also reads the end of the prompt.";
  const tree = $("#tree");
  tree.replaceChildren(nodes.length ? treeOf(now) : h("p", { class: "quiet" }, none));
  const end = $("em", tree); // where the accepted drafts end
  tree.scrollLeft = end ? end.offsetLeft - tree.clientWidth / 2 : 0;
  const phases = Object.entries({ Draft: draft, Decode: decode, Accept: accept });
  const facts = phases.map(([name, ms]) => {
    const phase = name.toLowerCase();
    $(`.phases .${phase}`).style.flexGrow = ms;
    return h("li", { class: phase }, `${name} ${ms.toFixed(2)} ms`);
  });
  const shared = nTexts > 1 ? `, shared by ${nTexts} replies` : "";
  facts.push(h("li", {}, `${rows === 1 ? "1 row" : `${rows} rows`} in the batch${shared}`));
  $("#phases").replaceChildren(...facts);
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
      const node = [h("small", {}, "model"), h("em", { dir: "auto" }, shown(bonus))];
      list.prepend(h("li", {}, h("span", { class: "node" }, ...node)));
    }
    return list.firstChild ? list : "";
  };
  return below(-1);
}

// A piece of text with its spaces and line ends made visible.
const shown = (piece) => piece.replaceAll("\n", "↵").replaceAll(" ", "\u00a0") || "∅";

function play() {
  if (replay.at === replay.steps.length - 1) showStep(0);
  showPlaying(true);
  const wait = () => {
    const ms = Math.min(msOf(replay.steps[replay.at]), SLOWEST) * Number($("#slow").value);
    replay.timer = setTimeout(next, Math.max(ms, LEAST_SHOWN));
  };
  const next = () => {
    if (replay.at >= replay.steps.length - 1) return stopReplay();
    showStep(replay.at + 1);
    wait();
  };
  wait();
}

function stopReplay() {
  if (!replay?.timer) return;
  clearTimeout(replay.timer);
  replay.timer = 0;
  showPlaying(false);
}

function showPlaying(isPlaying) {
  const button = $("#play");
  button.replaceChildren(icon(isPlaying ? "pause" : "play"));
  button.ariaLabel = button.title = isPlaying ? "Pause" : "Play";
}
