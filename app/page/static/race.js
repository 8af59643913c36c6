// Race: two methods write the same text in turn, which fills their lanes; then both are played on one clock, while
// further rounds make the number more certain.

import { $, $$, h, openDialog, plain, selectOf, setText, tried } from "./dom.js";
import { api, listeners, showFirst } from "./api.js";
import { PLAIN, missingFor, nameOf, server, settings, titleOf } from "./settings.js";

const MOST_TOKENS = 256; // of each run, so that a race takes seconds
const MOST_GONE = 1000; // ms between two frames: longer ones come from a hidden page, which waits
let race = null; // of the open dialog: { id: of the race that runs, result, … }

// On a finished reply ({ turn }) or on a text ({ prompt }).
export function openRace({ turn = null, prompt = "", start = false, method = settings.method }) {
  const choices = server.methods.filter(({ name }) => !missingFor(name)).map(({ name, title }) => [name, title]);
  const own = method === PLAIN ? "auto" : nameOf(method);
  const select = (label, chosen) => selectOf({ "aria-label": label }, choices, chosen);
  const methods = [select("First method", PLAIN), select("Second method", own)];
  const go = h("button.primary", "Start");
  const what = `Each method writes the text in turn, with ${MOST_TOKENS} tokens at most.`;
  const note = h("span", { role: "status" }, `${what} Then both are played on one clock.`);
  const count = h("span", { "aria-hidden": "true" }); // changes too often to be announced
  const form = h("form.row", methods[0], h("span", "against"), methods[1], go);
  const stage = h("div.stage");
  const dialog = openDialog("Race", "race", form, h("p.quiet", note, count), stage);
  const opened = (race = { note, count, stage, error: $(".error", dialog), go });
  const stop = () => api("DELETE", `/races/${opened.id}`);
  const begin = async () => {
    cancelAnimationFrame(opened.frame);
    opened.result = null;
    const names = methods.map(({ value }) => value);
    showLanes(names);
    const max_tokens = Math.min(settings.max_tokens || MOST_TOKENS, MOST_TOKENS);
    const wanted = { methods: names, settings: { ...settings, max_tokens } };
    const path = turn ? `/turns/${turn.id}/race` : "/race";
    go.disabled = true;
    const begun = api("POST", path, turn ? wanted : { ...wanted, prompt }).finally(() => (go.disabled = false));
    opened.id = (await begun).race;
    go.textContent = "Stop";
    if (race !== opened) await stop();
  };
  form.onsubmit = tried(() => (opened.id ? stop() : showFirst(begin)));
  dialog.addEventListener("close", () => {
    cancelAnimationFrame(opened.frame);
    if (opened.id) stop().catch(console.warn);
    race = null;
  });
  if (start) form.requestSubmit();
}

listeners.race = (event) => {
  if (!race?.id || event.race !== race.id) return;
  const { result, progress, end } = event;
  if (progress) showProgress(progress);
  if (result) {
    const isPlaying = race.result && !$(".verdict", race.stage).firstChild;
    const isFirst = !race.result;
    race.result = result;
    if (!isPlaying) play(isFirst ? 0 : Infinity); // else the end of it tells the newest number
  }
  if (end === undefined) return;
  race.id = null;
  race.go.textContent = "Race again";
  setText(race.count, "");
  setText(race.note, race.result ? "As measured, on one clock." : "");
  setText(race.error, end);
};

function showProgress({ round, n_rounds, method, lane, n_tokens, left, tokens }) {
  setText(race.note, `Round ${round + 1} of ${n_rounds}: ${titleOf(method)}`);
  const seconds = left ? `, about ${Math.ceil(left)} s left` : "";
  setText(race.count, n_tokens ? `, ${n_tokens} tokens${seconds}` : ", reading the prompt");
  if (!round) write($$(".lane", race.stage)[lane], tokens, `${n_tokens} tokens`);
}

function showLanes(methods) {
  const lanes = methods.map((method) => {
    const title = titleOf(method);
    const heading = h("h3", title, h("span.clock"));
    const text = h("div.lane-text", { dir: "auto", tabindex: 0, role: "group" });
    text.ariaLabel = `Text of ${title}`;
    return h("section.lane", { "aria-label": title }, heading, text);
  });
  const again = plain("Play again", () => play(0), { hidden: true });
  race.stage.replaceChildren(h("div.lanes", ...lanes), h("p.verdict", { role: "status" }), h("div.row", again));
}

// More of a lane's text: tokens are [text, whether it was drafted].
function write(lane, tokens, clock) {
  const text = $(".lane-text", lane);
  text.append(...tokens.map(([piece, isDrafted]) => (isDrafted ? h("span.drafted", piece) : piece)));
  text.scrollTop = text.scrollHeight;
  $(".clock", lane).textContent = clock;
}

const secondsOf = ({ tokens }) => tokens.at(-1)?.[0] ?? 0;

// Plays the result from a second on.
function play(now) {
  cancelAnimationFrame(race.frame);
  const { stage, result } = race;
  const lanes = $$(".lane", stage).map((lane, n) => ({ lane, n: 0, run: result.played[n] }));
  const verdict = $(".verdict", stage);
  verdict.replaceChildren();
  $(".plain", stage).hidden = false;
  for (const { lane } of lanes) $(".lane-text", lane).replaceChildren();
  const longest = Math.max(...result.played.map(secondsOf));
  let before = performance.now();
  const draw = () => {
    const gone = performance.now() - before;
    before += gone;
    now += Math.min(gone, MOST_GONE) / 1000;
    for (const one of lanes) {
      const { tokens } = one.run;
      const from = one.n;
      while (one.n < tokens.length && tokens[one.n][0] <= now) one.n++;
      const come = tokens.slice(from, one.n).map(([, ...token]) => token);
      write(one.lane, come, `${Math.min(now, secondsOf(one.run)).toFixed(2)} s`);
      one.lane.classList.toggle("over", one.n === tokens.length);
    }
    if (now < longest) race.frame = requestAnimationFrame(draw);
    else verdict.replaceChildren(h("b", race.result.sentence), `. ${race.result.texts}`);
  };
  draw();
}
