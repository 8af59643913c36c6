// Tools: the calls below a reply, and the dialog in which a chat chooses its tools.
//
// What servers and models say is text, never HTML.

import { button, h, notify, openDialog, render, tried } from "./dom.js";
import { api } from "./api.js";
import { changeSettings, settings } from "./settings.js";
import { chat } from "./transcript.js";

const STATES = {
  asked: "waits for your answer",
  running: "is running",
  denied: "was not allowed",
  stopped: "was stopped",
  interrupted: "was interrupted",
  done: "has ended",
  repeated: "was made just before: its result is above",
};
const ANSWERS = { once: "Allow once", always: "Always in this chat", never: "Never" };

// A call with its arguments and its result. The buttons are for the call that is shown last.
export function callOf({ name, server, tool, arguments: given, state, result, is_error, waits }, n) {
  const told = is_error ? "failed" : (STATES[state] ?? "");
  const answers = Object.entries(ANSWERS).map(([answer, label]) =>
    button(label, null, { class: "plain", "data-action": "answer", "data-answer": answer, "data-n": n }),
  );
  return h(
    "li",
    { class: state },
    h("p", {}, h("b", {}, tool || name), server ? ` of ${server} ` : " ", h("span", {}, told)),
    h("pre", { dir: "auto" }, given),
    h("div", { class: "row answers", hidden: !waits }, ...answers),
    h("details", { hidden: !result }, h("summary", {}, "Result"), h("pre", { dir: "auto" }, result)),
  );
}

export const openTools = tried(async () => {
  const box = h("div", { "aria-live": "polite" });
  const error = h("p", { class: "error", role: "alert", hidden: true });
  const show = ({ servers, file }) => {
    const about = `Servers of tools are named in ${file}. Each call waits for your answer.`;
    render(box, ...servers.map(serverOf), h("p", { class: "quiet" }, about));
  };
  const ask = (method, ...given) => tried(async () => show(await api(method, ...given)), () => error)();

  function serverOf({ name, state, note, tools }) {
    const without = settings.tools?.[name];
    const choose = async ({ target }) => {
      const { [name]: _, ...others } = settings.tools ?? {};
      changeSettings({ tools: target.checked ? { ...others, [name]: [] } : others });
      await ask(...(target.checked ? ["POST", `/tools/${name}`, { again: false }] : ["GET", "/tools"]));
    };
    const toolOf = ({ own, description }) => {
      const chooseTool = ({ target }) => {
        const left = settings.tools[name].filter((one) => one !== own);
        changeSettings({ tools: { ...settings.tools, [name]: target.checked ? left : [...left, own] } });
      };
      const check = { type: "checkbox", checked: !without.includes(own), onchange: chooseTool };
      return h("li", { class: "tool" }, h("label", {}, h("input", check), h("span", {}, h("b", {}, own), ` ${description}`)));
    };
    const restart = () => ask("POST", `/tools/${name}`, { again: true });
    const check = h("input", { type: "checkbox", checked: !!without, onchange: choose });
    const title = h("label", {}, check, h("b", {}, name), h("span", { class: "quiet" }, state));
    return h(
      "section",
      { class: "server", "aria-label": name },
      h("div", { class: "row" }, title, state !== "off" && button("Restart", restart, { class: "plain" })),
      note && h("p", { class: "notice" }, note),
      without && h("ul", {}, ...tools.map(toolOf)),
    );
  }

  const forget = async () => {
    await api("DELETE", `/chats/${chat.id}/answers`);
    notify("Each call of this chat is asked for again");
  };
  const again = button("Ask again for each call", tried(forget, () => error), { class: "plain", hidden: !chat });
  openDialog("Tools", "wide", box, error, again);
  await ask("GET", "/tools");
});
