// Race: two methods write the same text in turn, several times, then are played on one clock.

const MOST_TOKENS = 256; // of each run, so that a race takes seconds
let race = null; // { id, dialog, played, … }

// On a finished reply ({ turn }) or on a text ({ prompt }).
function openRace({ turn = null, prompt = "", start = false }) {
  const usable = server.methods.filter(({ name }) => !missingFor(name));
  const choice = (label, value) => {
    const select = h("select", { "aria-label": label });
    select.append(...usable.map(({ name, title }) => h("option", { value: name }, title)));
    select.value = value;
    return select;
  };
  const own = settings.method === PLAIN ? "auto" : nameOf(settings.method);
  const methods = [choice("First method", PLAIN), choice("Second method", own)];
  const go = h("button", { class: "primary" }, "Start");
  const what = `Each method writes the text three times, in turn, with ${MOST_TOKENS} tokens at most.`;
  const note = h("p", { class: "quiet", role: "status" }, `${what} Then both are played on one clock.`);
  const error = h("p", { class: "error", role: "alert", hidden: true });
  const form = h("form", { class: "row" }, methods[0], h("span", {}, "against"), methods[1], go);
  const stage = h("div", { class: "stage" });
  const dialog = openDialog("Race", form, error, note, stage);
  dialog.classList.add("race");
  const said = turn ? turns.find(({ id }) => id === turn.parent)?.text : prompt;
  race = { dialog, note, stage, error, go, said: said ?? "" };
  form.onsubmit = tried(
    async (event) => {
      event.preventDefault();
      go.disabled = true;
      stage.replaceChildren();
      const max_tokens = Math.min(settings.max_tokens || MOST_TOKENS, MOST_TOKENS);
      const wanted = { methods: methods.map(({ value }) => value), settings: { ...settings, max_tokens } };
      const path = turn ? `/turns/${turn.id}/race` : "/race";
      race.early = []; // events that come before the answer
      try {
        race.id = (await api("POST", path, turn ? wanted : { ...wanted, prompt })).race;
      } catch (failure) {
        go.disabled = false;
        throw failure;
      }
      race.early.splice(0).forEach(listeners.race);
    },
    () => error,
  );
  dialog.addEventListener("close", () => {
    cancelAnimationFrame(race?.frame);
    if (race?.id && !race.result) api("DELETE", `/races/${race.id}`).catch(console.warn);
    race = null;
  });
  if (start) form.requestSubmit();
}

listeners.race = (event) => {
  if (race && !race.id && race.early) return race.early.push(event);
  if (!race || event.race !== race.id || race.result) return;
  const { result, error, progress } = event;
  if (progress) {
    const { round, n_rounds, method, n_tokens } = progress;
    setText(race.note, `Round ${round + 1} of ${n_rounds}: ${titleOf(method)}, ${n_tokens} tokens`);
  }
  if (error) {
    race.result = {};
    race.go.disabled = false;
    setText(race.error, error);
  }
  if (!result) return;
  race.result = result;
  race.go.disabled = false;
  race.go.textContent = "Race again";
  playRace();
};

function playRace() {
  const { stage, result, note } = race;
  const lanes = result.played.map(({ method, tokens }) => {
    const text = h("div", { class: "lane-text", dir: "auto" });
    const clock = h("span", { class: "clock" }, "0.00 s");
    const heading = h("h3", {}, titleOf(method), clock);
    const lane = h("section", { class: "lane", "aria-label": titleOf(method) }, heading, text);
    return { tokens, text, clock, lane, n: 0, end: tokens.at(-1)?.[0] ?? 0 };
  });
  lanes.forEach(({ text }) => text.setAttribute("aria-hidden", "true"));
  const verdict = h("p", { class: "verdict", role: "status" });
  const buttons = h("div", { class: "row", hidden: true });
  buttons.append(button("Play again", playRace), button("Save a picture", savePicture));
  stage.replaceChildren(h("div", { class: "lanes" }, ...lanes.map(({ lane }) => lane)), verdict, buttons);
  setText(note, "As measured, on one clock.");
  cancelAnimationFrame(race.frame);
  const began = performance.now();
  const draw = () => {
    const now = (performance.now() - began) / 1000;
    for (const one of lanes) {
      while (one.n < one.tokens.length && one.tokens[one.n][0] <= now) {
        const [, text, isDrafted] = one.tokens[one.n++];
        one.text.append(isDrafted ? h("span", { class: "drafted" }, text) : text);
      }
      one.text.scrollTop = one.text.scrollHeight;
      one.clock.textContent = `${Math.min(now, one.end).toFixed(2)} s`;
      one.lane.classList.toggle("over", one.n === one.tokens.length);
    }
    if (lanes.some(({ n, tokens }) => n < tokens.length)) race.frame = requestAnimationFrame(draw);
    else {
      verdict.replaceChildren(
        h("b", {}, result.sentence),
        ` ${result.same ? "Same text ✓" : result.parting}`,
      );
      buttons.hidden = false;
    }
  };
  draw();
}

// Draws the result as a picture, in the page's colours.
function savePicture() {
  const { result, said } = race;
  const [width, height, pad] = [1200, 630, 48];
  const canvas = h("canvas", { width, height });
  const context = canvas.getContext("2d");
  const style = getComputedStyle(document.body);
  const colour = (name) => style.getPropertyValue(`--${name}`).trim();
  const write = (text, x, y, size, fill = "ink", weight = 400) => {
    context.font = `${weight} ${size}px system-ui, sans-serif`;
    context.fillStyle = colour(fill);
    context.fillText(text, x, y, width - pad - x);
  };
  context.fillStyle = colour("page");
  context.fillRect(0, 0, width, height);
  write(server.status?.model?.name ?? "", pad, 74, 24, "quiet");
  write(result.sentence, pad, 128, 36, "ink", 600);
  write(result.same ? "Same text ✓" : result.parting, pad, 172, 22, "quiet");
  const longest = Math.max(...result.played.map(({ tokens }) => tokens.at(-1)[0]));
  result.played.forEach(({ method, tokens }, n) => {
    const y = 250 + n * 130;
    const end = tokens.at(-1)[0];
    write(titleOf(method), pad, y, 26, "ink", 600);
    write(`${tokens.length} tokens in ${end.toFixed(2)} s`, pad + 420, y, 22, "quiet");
    context.fillStyle = colour(n ? "green" : "line");
    context.fillRect(pad, y + 18, (end / longest) * (width - 2 * pad), 44);
  });
  write(said.split("\n")[0].slice(0, 110), pad, height - 80, 20, "quiet");
  write("Made with Speculation, on this machine", pad, height - 44, 20, "quiet");
  canvas.toBlob((blob) => download(blob, "race.png"));
}
