// The chats that the browser keeps, in a database: what the list shows of each, and apart from that its
// text, so that a list is read without all texts. Nothing else opens the database. It stands in the
// page's head, and so before Gradio's first event.
//
// A chat is { name, title, named, at, size, version }: title is what was said first, or as the user named
// it; at is when it was kept; version is another with each text, so that a tab sees whether the
// text that it knows is still the one there.

const store = (() => {
  const MOST = 1000; // chats
  const SLOW = 15_000; // ms
  const SWITCH = "speculation:keeps-chats";
  const FIELDS = "speculation:fields";

  // Where the browser is told to keep nothing, it throws when it is asked for.
  let local = null;
  try {
    local = localStorage;
  } catch (error) {
    console.warn(error);
  }
  const areKept = () => local !== null && local.getItem(SWITCH) !== "no";
  const newName = () => `${Date.now()}-${Math.random().toString(36).slice(2, 8)}`;
  // What a Date can be made of.
  const isDate = (at) => Number.isFinite(at) && at >= 0 && at <= 8.64e15;
  const isChat = (chat) =>
    typeof chat?.name === "string" && typeof chat.title === "string" && isDate(chat.at);
  const latestFirst = (chats) => chats.sort((a, b) => b.at - a.at);
  // What is in the database may be of any program: it is mended, for it to be seen and deleted.
  const mended = (chat) => ({
    ...chat,
    title: typeof chat.title === "string" ? chat.title : "",
    at: isDate(chat.at) ? chat.at : 0,
    size: Number.isFinite(chat.size) ? chat.size : 0,
  });
  const all = async (chats) =>
    latestFirst((await done(chats.getAll())).filter(({ name }) => typeof name === "string").map(mended));

  // The database

  let opened = null;
  const database = () => (opened ??= local === null ? Promise.reject(trouble("it is told so")) : open());
  const trouble = (why) => Object.assign(new Error(why), { name: "Trouble" });

  function open() {
    return new Promise((resolve, reject) => {
      setTimeout(() => reject(trouble("its database does not open; load this page again")), SLOW);
      const asked = indexedDB.open("speculation", 1);
      asked.onupgradeneeded = () => {
        asked.result.createObjectStore("chats", { keyPath: "name" });
        asked.result.createObjectStore("texts"); // by name
      };
      asked.onblocked = () => {
        reject(trouble("another tab has an older version of this page; close it"));
      };
      asked.onerror = () => reject(asked.error);
      asked.onsuccess = () => {
        const database = asked.result;
        database.onversionchange = () => {
          database.close();
          opened = Promise.reject(trouble("a newer version of this page is open; load this one again"));
          opened.catch(() => tell(false));
        };
        database.onclose = () => (opened = null); // the browser cleared it
        opened = takeOver(database).then(() => database); // also where it comes late
        opened.then(resolve).then(() => tell(false));
      };
    });
  }

  // Why chats are not kept, for people.
  function reason(error) {
    if (error.name === "Trouble") return error.message;
    if (error.name === "QuotaExceededError") return "it has no more room";
    if (error.name === "VersionError") return "a newer version of this program was used at this address";
    return `its database cannot be used (${error.message || error.name})`;
  }

  const done = (request) =>
    new Promise((resolve, reject) => {
      request.onsuccess = () => resolve(request.result);
      request.onerror = () => reject(request.error);
    });

  // All that work does is done, or nothing of it. It may wait for requests alone.
  async function within(database, mode, work) {
    const transaction = database.transaction(["chats", "texts"], mode);
    const end = new Promise((resolve, reject) => {
      transaction.oncomplete = resolve;
      transaction.onabort = () => reject(transaction.error ?? new Error("broken off"));
    });
    end.catch(() => {}); // work may fail first
    try {
      const result = await work(...["chats", "texts"].map((name) => transaction.objectStore(name)));
      transaction.commit?.();
      await end;
      return result;
    } catch (error) {
      try {
        transaction.abort();
      } catch {} // it is
      throw transaction.error ?? error;
    }
  }

  const read = async (work) => within(await database(), "readonly", work);

  // One after the other, in the order they were asked for.
  let last = Promise.resolve();
  function write(work) {
    const written = last.then(work);
    last = written.catch(() => {});
    written.then(() => tell(true), () => tell(false));
    return written;
  }
  const change = async (work) => within(await database(), "readwrite", work);

  // This tab is told of every change, and the others of those made here.
  let channel = null;
  try {
    channel = new BroadcastChannel("speculation:chats");
    channel.onmessage = () => tell(false);
  } catch (error) {
    console.warn(error);
  }
  function tell(isOurs) {
    document.dispatchEvent(new Event("chats-changed"));
    if (isOurs) channel?.postMessage("");
  }
  window.addEventListener("storage", ({ key }) => {
    if (key !== SWITCH) return;
    if (areKept()) tell(false);
    else write(clear).catch(console.warn); // what this tab just kept goes, too
  });

  const clear = () => change((chats, texts) => Promise.all([done(chats.clear()), done(texts.clear())]));

  async function put(chats, texts, chat, text) {
    const { name, title, named = false, at, version } = chat;
    await done(chats.put({ name, title, named, at, version, size: text.length }));
    await done(texts.put(text, name));
  }

  async function drop(chats, texts, name) {
    await done(chats.delete(name));
    await done(texts.delete(name));
  }

  // What earlier versions kept in localStorage

  const OLD = "speculation:chats";
  const oldKey = (name) => `speculation:chat:${name}`;

  function oldChats() {
    try {
      const found = JSON.parse(local.getItem(OLD) ?? "[]");
      return Array.isArray(found) ? found.filter(isChat) : [];
    } catch (error) {
      console.warn(error);
      return [];
    }
  }

  // Each goes from there once it is in the database. Where that was broken off, or an older version
  // was used in between, there may be one of its name; unless it is the same, both are kept.
  let leftBehind = "";
  async function takeOver(database) {
    let failed = null;
    for (const chat of oldChats()) {
      try {
        await within(database, "readwrite", async (chats, texts) => {
          const there = await done(texts.get(chat.name));
          const text = local.getItem(oldKey(chat.name)); // unless another tab was quicker
          if (text === null || text === there) return;
          const name = there === undefined ? chat.name : newName();
          await put(chats, texts, { ...chat, name, version: newName() }, text);
        });
        local.removeItem(oldKey(chat.name));
        local.setItem(OLD, JSON.stringify(oldChats().filter(({ name }) => name !== chat.name)));
      } catch (error) {
        console.warn(error);
        failed = error;
      }
    }
    const left = oldChats().length;
    if (!left) local.removeItem(OLD);
    leftBehind =
      failed && left
        ? `${left} of earlier versions could not be taken over: ${reason(failed)}`
        : "";
  }

  // Room

  // The limit is kept in the same transaction.
  async function dropBeyondLimit(chats, texts) {
    if ((await done(chats.count())) <= MOST) return [];
    const beyond = (await all(chats)).slice(MOST);
    for (const { name } of beyond) await drop(chats, texts, name);
    return beyond;
  }

  // Where there is no room the oldest make way, as many as it takes: what a transaction deletes gives
  // room only to those after it. If that is no help they are put back.
  let isFull = false; // so that it is not tried again and again
  async function withRoom(size, name, work) {
    const gone = [];
    for (;;) {
      try {
        const result = await work();
        isFull = false;
        return { ...result, gone: [...gone.map(([chat]) => chat), ...result.gone] };
      } catch (error) {
        const others = (await read(all)).filter((chat) => chat.name !== name);
        const sizeOf = (list) => list.reduce((sum, chat) => sum + chat.size, 0);
        const freed = sizeOf(gone.map(([chat]) => chat));
        const helps = others.length > 0 && freed < 2 * size && freed + sizeOf(others) >= size;
        if (error.name !== "QuotaExceededError" || isFull || !helps) {
          isFull ||= gone.length > 0;
          throw Object.assign(error, { gone: await putBack(gone) });
        }
        const oldest = others.at(-1);
        const text = await read((chats, texts) => done(texts.get(oldest.name)));
        await change((chats, texts) => drop(chats, texts, oldest.name));
        gone.push([oldest, text ?? ""]);
      }
    }
  }

  // Gives those that have no room any more.
  async function putBack(gone) {
    const lost = [];
    for (const [chat, text] of gone) {
      try {
        await change((chats, texts) => put(chats, texts, chat, text));
      } catch (error) {
        console.warn(error);
        lost.push(chat);
      }
    }
    return lost;
  }

  let isAsked = false;
  function askToStay() {
    // Chromium decides by itself; Firefox would ask the user, out of the blue.
    if (!isAsked && navigator.userAgentData) navigator.storage?.persist?.().catch(console.warn);
    isAsked = true;
  }

  return {
    newName,
    isDate,
    areKept,
    reason,

    // Raises why nothing can be kept; else gives what could not be taken over.
    check: async () => {
      await database();
      return leftBehind;
    },

    // The latest first, without their texts.
    list: () => read(all),

    text: (name) => read((chats, texts) => done(texts.get(name))),

    // { chat, text }, or nothing.
    read: (name) =>
      read(async (chats, texts) => {
        const chat = await done(chats.get(name));
        const text = await done(texts.get(name));
        return chat && text ? { chat: mended(chat), text } : undefined;
      }),

    // What a tab has made of a chat whose text was `before`, in one of these versions: where another tab
    // made something else of it, both stay, and this one gets another name. Gives its name, none
    // where chats are not to be kept, and the chats that had to go; so does the error that it raises.
    keep: ({ name, versions }, { title, version, before }, text) =>
      write(() =>
        withRoom(text.length, name, () =>
          change(async (chats, texts) => {
            if (!areKept()) return { name: null, gone: [] };
            const found = await done(chats.get(name));
            const isOurs =
              !found || versions.includes(found.version) || (await done(texts.get(name))) === before;
            const chat = { name: isOurs ? name : newName(), title, at: Date.now(), version };
            if (isOurs && found?.named) Object.assign(chat, { title: found.title, named: true });
            await put(chats, texts, chat, text);
            return { name: chat.name, gone: await dropBeyondLimit(chats, texts) };
          }),
        ).then((kept) => (askToStay(), kept)),
      ),

    // From a file: one that is here is replaced by a newer one alone. Gives what became of it.
    add: (chat, text) =>
      write(() =>
        change(async (chats, texts) => {
          const found = await done(chats.get(chat.name));
          if (found && mended(found).at >= chat.at) return "known";
          if (!found && (await done(chats.count())) >= MOST) return "beyond";
          await put(chats, texts, { ...chat, version: newName() }, text);
          return "added";
        }),
      ),

    rename: (name, title, named) =>
      write(() =>
        change(async (chats) => {
          const chat = await done(chats.get(name));
          if (chat) await done(chats.put({ ...chat, title, named })); // else another tab deleted it
        }),
      ),

    remove: (name) => write(() => change((chats, texts) => drop(chats, texts, name))),

    // The settings that new tabs begin with, as JSON: they are kept where chats are.
    fields: () => (areKept() ? local.getItem(FIELDS) : null),
    keepFields: (text) => areKept() && local.setItem(FIELDS, text),

    // Whether chats are kept from now on; if not, those that were are forgotten.
    switchTo: (on) => {
      if (on) local.removeItem(SWITCH);
      else {
        local.setItem(SWITCH, "no");
        local.removeItem(FIELDS);
      }
      return on ? Promise.resolve() : write(clear);
    },
  };
})();
