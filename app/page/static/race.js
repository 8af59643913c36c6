// Race: two methods write the same text in turn, several times, then are played on one clock.

const MOST_TOKENS = 256; // of each run, so that a race takes seconds
const MOST_SECONDS = 20; // of a film, which is faster than the race if that took longer
const LAST_SECONDS = 2; // for which a film shows the result
const MOST_GONE = 1000; // ms between two frames: longer ones come from a hidden page, which waits
const FILM =
  window.MediaRecorder && ["video/webm", "video/mp4"].find((type) => MediaRecorder.isTypeSupported(type));
let race = null; // of the open dialog: { id: of the race that runs, early, result, … }

// On a finished reply ({ turn }) or on a text ({ prompt }), of which a picture shows the line `said`.
function openRace({ turn = null, prompt = "", said = prompt, start = false }) {
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
  const note = h("span", { role: "status" }, `${what} Then both are played on one clock.`);
  const count = h("span", { "aria-hidden": "true" }); // changes too often to be announced
  const error = h("p", { class: "error", role: "alert", hidden: true });
  const form = h("form", { class: "row" }, methods[0], h("span", {}, "against"), methods[1], go);
  const stage = h("div", { class: "stage" });
  const dialog = openDialog("Race", form, error, h("p", { class: "quiet" }, note, count), stage);
  dialog.classList.add("race");
  if (turn) said = turns.find(({ id }) => id === turn.parent)?.text ?? "";
  const opened = (race = { note, count, stage, error, go, said });
  const stop = () => api("DELETE", `/races/${opened.id}`);
  form.onsubmit = tried(
    async (event) => {
      event.preventDefault();
      if (opened.early) return; // it is about to start
      if (opened.id) return stop();
      endPlay(opened);
      stage.replaceChildren();
      const max_tokens = Math.min(settings.max_tokens || MOST_TOKENS, MOST_TOKENS);
      const wanted = { methods: methods.map(({ value }) => value), settings: { ...settings, max_tokens } };
      const path = turn ? `/turns/${turn.id}/race` : "/race";
      const early = (opened.early = []); // events that come before the answer
      try {
        opened.id = (await api("POST", path, turn ? wanted : { ...wanted, prompt })).race;
      } finally {
        opened.early = null;
      }
      if (race !== opened) return stop();
      go.textContent = "Stop";
      early.forEach(listeners.race);
    },
    () => error,
  );
  dialog.addEventListener("close", () => {
    endPlay(opened);
    if (opened.id) stop().catch(console.warn);
    race = null;
  });
  if (start) form.requestSubmit();
}

listeners.race = (event) => {
  if (race?.early) return race.early.push(event);
  if (!race?.id || event.race !== race.id) return;
  const { result, error, progress } = event;
  if (progress) {
    const { round, n_rounds, method, n_tokens } = progress;
    setText(race.note, `Round ${round + 1} of ${n_rounds}: ${titleOf(method)}`);
    setText(race.count, `, ${n_tokens} tokens`);
    return;
  }
  race.id = null;
  race.go.textContent = "Race again";
  setText(race.count, "");
  setText(race.note, result ? "As measured, on one clock." : "");
  setText(race.error, error ?? "");
  if (!result) return;
  race.result = result;
  showResult();
};

function showResult() {
  const lanes = race.result.played.map(({ method }) => {
    const title = titleOf(method);
    const heading = h("h3", {}, title, h("span", { class: "clock" }));
    const text = h("div", { class: "lane-text", dir: "auto", tabindex: 0, role: "group" });
    text.ariaLabel = `Text of ${title}`;
    return h("section", { class: "lane", "aria-label": title }, heading, text);
  });
  const buttons = [
    button("Play again", () => playRace()),
    button("Save a picture", savePicture),
    FILM && button("Save a film", saveFilm),
  ];
  race.stage.replaceChildren(
    h("div", { class: "lanes" }, ...lanes),
    h("p", { class: "verdict", role: "status" }),
    h("div", { class: "row" }, ...buttons.filter(Boolean)),
  );
  playRace();
}

const secondsOf = ({ tokens }) => tokens.at(-1)?.[0] ?? 0;
const longestOf = ({ played }) => Math.max(...played.map(secondsOf));
const endOf = ({ same, parting }) => (same ? "Same text ✓" : parting);

// Plays both texts; a film is painted meanwhile.
function playRace(film = null) {
  endPlay(race);
  const { stage, result } = race;
  const lanes = $$(".lane", stage).map((lane, n) => ({ lane, n: 0, run: result.played[n] }));
  const verdict = $(".verdict", stage);
  verdict.replaceChildren();
  for (const { lane } of lanes) $(".lane-text", lane).replaceChildren();
  const longest = longestOf(result);
  const rate = film?.rate ?? 1;
  let now = 0;
  let before = performance.now();
  const draw = () => {
    const gone = performance.now() - before;
    before += gone;
    now += (Math.min(gone, MOST_GONE) / 1000) * rate;
    for (const one of lanes) {
      const { tokens } = one.run;
      const text = $(".lane-text", one.lane);
      while (one.n < tokens.length && tokens[one.n][0] <= now) {
        const [, piece, isDrafted] = tokens[one.n++];
        text.append(isDrafted ? h("span", { class: "drafted" }, piece) : piece);
      }
      text.scrollTop = text.scrollHeight;
      $(".clock", one.lane).textContent = `${Math.min(now, secondsOf(one.run)).toFixed(2)} s`;
      one.lane.classList.toggle("over", one.n === tokens.length);
    }
    if (now >= longest && !verdict.firstChild) {
      verdict.append(h("b", {}, result.sentence), `. ${endOf(result)}`);
    }
    film?.paint(now);
    if (now < longest + (film ? LAST_SECONDS * rate : 0)) race.frame = requestAnimationFrame(draw);
    else film?.save();
  };
  draw();
}

function endPlay(one) {
  cancelAnimationFrame(one.frame);
  one.recorder?.stop();
  one.recorder = null;
}

function savePicture() {
  const { canvas, paint } = painterOf(race);
  paint(Infinity);
  canvas.toBlob((blob) => download(blob, "race.png"));
}

// Records the canvas while the race is played.
function saveFilm() {
  const { note, result } = race;
  const rate = Math.max(1, longestOf(result) / MOST_SECONDS);
  const { canvas, paint } = painterOf(race, rate);
  const recorder = new MediaRecorder(canvas.captureStream(), { mimeType: FILM, videoBitsPerSecond: 4e6 });
  const parts = [];
  recorder.ondataavailable = ({ data }) => parts.push(data);
  const save = () => {
    recorder.onstop = () => download(new Blob(parts, { type: FILM }), `race.${FILM.split("/")[1]}`);
    recorder.stop();
    setText(note, "The film is saved.");
  };
  document.onvisibilitychange = () => {
    if (recorder.state !== "inactive") document.hidden ? recorder.pause() : recorder.resume();
  };
  playRace({ paint, rate, save });
  race.recorder = recorder;
  recorder.start();
  setText(note, "The film is recorded while it plays.");
}

// Paints the race as it was after `now` seconds, in the page's colours.
function painterOf({ result, said }, rate = 1) {
  const [width, height, pad, gap] = [1280, 720, 48, 40];
  const column = (width - 2 * pad - gap) / 2;
  const [top, high, most] = [216, 29, 11]; // of the lines of text
  const canvas = h("canvas", { width, height });
  const context = canvas.getContext("2d");
  const style = getComputedStyle(document.body);
  const use = (fill, size = 20, weight = 400) => {
    context.fillStyle = style.getPropertyValue(`--${fill}`).trim();
    context.font = `${weight} ${size}px system-ui, sans-serif`;
  };
  use("ink");
  const lanes = result.played.map((run) => ({
    run,
    lines: linesOf(context, run.tokens, column),
    isRtl: h("p", { dir: "auto" }, textOf(run.tokens)).matches(":dir(rtl)"),
  }));
  const paint = (now) => {
    const write = (text, x, y, most = width - 2 * pad) => context.fillText(text, x, y, most);
    use("page");
    context.fillRect(0, 0, width, height);
    use("quiet");
    write(server.status?.model?.name ?? "", pad, 64);
    write(said.split("\n")[0].slice(0, 110), pad, 96);
    const pace = rate > 1 ? `, played ${rate.toFixed(1)} times as fast` : "";
    write(`Made with Speculation, as measured on this machine${pace}`, pad, height - 34);
    lanes.forEach(({ run, lines, isRtl }, n) => {
      const x = pad + n * (column + gap);
      const seconds = Math.min(now, secondsOf(run));
      const shown = run.tokens.filter(([at]) => at <= now);
      use("quiet", 22);
      const clock = `${shown.length} tokens in ${seconds.toFixed(2)} s`;
      write(clock, x + column - context.measureText(clock).width, 152);
      use("ink", 24, 600);
      write(titleOf(run.method), x, 152, column - 240);
      use("line");
      context.fillRect(x, 168, column, 8);
      use(n ? "green" : "quiet");
      context.fillRect(x, 168, (seconds / longestOf(result)) * column, 8);
      const n_shown = textOf(shown).length;
      const begun = lines.filter(({ from }) => from < n_shown).slice(-most);
      begun.forEach(({ text, from, marks }, row) => {
        const y = top + row * high;
        use("ink");
        context.direction = isRtl ? "rtl" : "ltr";
        write(text.slice(0, n_shown - from), isRtl ? x + column : x, y);
        use("green");
        for (const [start, wide, end] of marks) {
          const left = isRtl ? column - start - wide : start;
          if (end <= n_shown) context.fillRect(x + left, y + 5, wide, 2);
        }
      });
      context.direction = "ltr";
    });
    if (now < longestOf(result)) return;
    use("ink", 30, 600);
    write(result.sentence, pad, 580);
    use("quiet", 22);
    linesOf(context, [[0, endOf(result)]], width - 2 * pad).forEach(({ text }, n) =>
      write(text, pad, 616 + n * 26),
    );
  };
  return { canvas, paint };
}

const textOf = (tokens) => tokens.map(([, piece]) => piece.replaceAll("\t", "    ")).join("");

// Breaks a text into lines: { text, from: its place, marks: [x, width, end] of each drafted token }.
function linesOf(context, tokens, width) {
  const text = textOf(tokens);
  const wide = (from, to) => context.measureText(text.slice(from, to).replace("\n", "")).width;
  const lines = [];
  let from = 0;
  let to = 0;
  const end = () => {
    lines.push({ text: text.slice(from, to), from, to, marks: [] });
    from = to;
  };
  for (const [word] of text.matchAll(/\n|[^\S\n]+|\S{1,24}/gu)) {
    if (word.trim() && wide(from, to + word.length) > width) end();
    to += word.length;
    if (word === "\n") end();
  }
  end();
  let at = 0;
  for (const token of tokens) {
    const begin = at;
    at += textOf([token]).length;
    for (const line of token[2] ? lines : []) {
      const [a, b] = [Math.max(begin, line.from), Math.min(at, line.to)];
      if (a < b) line.marks.push([wide(line.from, a), wide(a, b), at]);
    }
  }
  return lines;
}
