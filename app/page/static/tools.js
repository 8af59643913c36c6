// Tools: the calls below a reply, and the dialog in which a chat chooses its tools.
//
// What servers and models say is text, never HTML.

import { $, h, notify, openDialog, plain, render, tried } from "./dom.js";
import { api } from "./api.js";
import { addFiles, compose } from "./composer.js";
import { changeSettings, closeDrawer, settings } from "./settings.js";
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
    plain(label, null, { "data-action": "answer", "data-answer": answer, "data-n": n }),
  );
  return h(
    `li.${state}`,
    h("p", h("b", tool || name), server ? ` of ${server} ` : " ", h("span", told)),
    h("pre", { dir: "auto" }, given),
    h("div.row.answers", { hidden: !waits }, ...answers),
    h("details", { hidden: !result }, h("summary", "Result"), h("pre", { dir: "auto" }, result)),
  );
}

export const openTools = tried(async () => {
  const box = h("div", { "aria-live": "polite" });
  const ask = tried(async (...given) => {
    const { servers, file } = await api(...given);
    const about = `Servers of tools are named in ${file}. Each call waits for your answer.`;
    render(box, ...servers.map(serverOf), h("p.quiet", about));
  });

  function serverOf({ name, state, note, tools, resources, prompts }) {
    const start = (again) => ask("POST", `/tools/${name}`, { again });
    const forms = [...resources.map(formOf("resources", "Attach")), ...prompts.map(formOf("prompts", "Insert"))];
    const choose = (uses) => (leaveOut(name, uses && []), uses ? start(false) : ask("GET", "/tools"));
    const title = checkOf(!!leftOut(name), choose, h("b", name), h("span.quiet", state));
    return h(
      "section.server",
      { "aria-label": name },
      h("div.row", title, state !== "off" && plain("Restart", () => start(true))),
      note && h("p.notice", note),
      leftOut(name) && h("ul", ...tools.map(toolOf)),
      forms.length > 0 && h("details", h("summary", "Resources and prompts"), h("ul", ...forms)),
    );
  }

  // A resource to attach, or a prompt to insert, which asks for its arguments.
  const formOf = (kind, label) => ({ server, name, own, description, schema: { properties, required } }) => {
    const onsubmit = tried(async ({ target }) => {
      const given = Object.fromEntries(new FormData(target));
      const { texts } = await api("POST", `/tools/${server}/${kind}`, { own, arguments: given });
      dialog.close();
      closeDrawer();
      if (kind === "resources") return addFiles(texts.map((one) => new File([one.text], one.name)));
      compose([$("#box").value, ...texts.map((one) => one.text)].filter(Boolean).join("\n\n"));
      $("#box").focus();
    });
    const fields = Object.keys(properties).map((one) =>
      h("input", { name: one, "aria-label": one, placeholder: one, required: required.includes(one) }),
    );
    const submit = h("button.plain", { "aria-label": `${label} ${name}` }, label);
    return h("li.tool", h("form", { onsubmit }, h("p", h("b", name), ` ${description}`), ...fields, submit));
  };

  const forget = tried(async () => {
    await api("DELETE", `/chats/${chat.id}/answers`);
    notify("Each call of this chat is asked for again");
  });
  const dialog = openDialog("Tools", "wide", box, plain("Ask again for each call", forget, { hidden: !chat }));
  await ask("GET", "/tools");
});

// The tools of a server that the chat does not use; nothing if it does not use the server.
const leftOut = (server) => settings.tools?.[server];
function leaveOut(server, tools) {
  const { [server]: _, ...others } = settings.tools ?? {};
  changeSettings({ tools: tools ? { ...others, [server]: tools } : others });
}

function toolOf({ server, own, description }) {
  const choose = (uses) => leaveOut(server, [...leftOut(server).filter((one) => one !== own), ...(uses ? [] : [own])]);
  return h("li.tool", checkOf(!leftOut(server).includes(own), choose, h("span", h("b", own), ` ${description}`)));
}

const checkOf = (checked, choose, ...label) =>
  h("label", h("input", { type: "checkbox", checked, onchange: ({ target }) => choose(target.checked) }), ...label);
