// Saved chats, in IndexedDB: one store has what the list shows, another has the texts, so that listing
// chats reads no texts. Nothing else opens the database. Loaded in the page's head.
//
// A chat is { name, title, named, at, size, version }. title is its first message or was given by the
// user (named); at is when it was saved. Each saved text gets a new version, so that a tab sees whether
// another tab has changed the chat.

const store = (() => {
  const MAX_CHATS = 1000;
  const OPEN_TIMEOUT = 15_000; // ms
  const SWITCH = "speculation:keeps-chats";
  const FIELDS = "speculation:fields";

  // Throws if the browser is set to store nothing.
  let local = null;
  try {
    local = localStorage;
  } catch (error) {
    console.warn(error);
  }
  const savesChats = () => local !== null && local.getItem(SWITCH) !== "no";
  const newName = () => `${Date.now()}-${Math.random().toString(36).slice(2, 8)}`;
  // Whether it is valid for Date.
  const isDate = (at) => Number.isFinite(at) && at >= 0 && at <= 8.64e15;
  const isChat = (chat) =>
    typeof chat?.name === "string" && typeof chat.title === "string" && isDate(chat.at);
  const latestFirst = (chats) => chats.sort((a, b) => b.at - a.at);
  // Other programs at this address may write to the database. Repaired, an entry can be shown and deleted.
  const repaired = (chat) => ({
    ...chat,
    title: typeof chat.title === "string" ? chat.title : "",
    at: isDate(chat.at) ? chat.at : 0,
    size: Number.isFinite(chat.size) ? chat.size : 0,
  });
  const all = async (chats) =>
    latestFirst((await done(chats.getAll())).filter(({ name }) => typeof name === "string").map(repaired));

  // The database

  let opened = null;
  const database = () => (opened ??= local === null ? Promise.reject(unavailable("it is set to store nothing")) : open());
  const unavailable = (why) => Object.assign(new Error(why), { name: "Unavailable" });

  function open() {
    return new Promise((resolve, reject) => {
      setTimeout(() => reject(unavailable("its database does not open; reload this page")), OPEN_TIMEOUT);
      const asked = indexedDB.open("speculation", 1);
      asked.onupgradeneeded = () => {
        asked.result.createObjectStore("chats", { keyPath: "name" });
        asked.result.createObjectStore("texts"); // by name
      };
      asked.onblocked = () => {
        reject(unavailable("another tab has an older version of this page open; close that tab"));
      };
      asked.onerror = () => reject(asked.error);
      asked.onsuccess = () => {
        const database = asked.result;
        database.onversionchange = () => {
          database.close();
          opened = Promise.reject(unavailable("a newer version of this page is open; reload this one"));
          opened.catch(() => notify(false));
        };
        database.onclose = () => (opened = null); // the browser cleared it
        opened = migrate(database).then(() => database); // even after the timeout
        opened.then(resolve).then(() => notify(false));
      };
    });
  }

  // Why chats are not saved, in words for the user.
  function reason(error) {
    if (error.name === "Unavailable") return error.message;
    if (error.name === "QuotaExceededError") return "it is out of space";
    if (error.name === "VersionError") return "a newer version of this program has used this address";
    return `its database cannot be used (${error.message || error.name})`;
  }

  const done = (request) =>
    new Promise((resolve, reject) => {
      request.onsuccess = () => resolve(request.result);
      request.onerror = () => reject(request.error);
    });

  // Runs work in a transaction: all of it takes effect or nothing. work may await only requests.
  async function within(database, mode, work) {
    const transaction = database.transaction(["chats", "texts"], mode);
    const end = new Promise((resolve, reject) => {
      transaction.oncomplete = resolve;
      transaction.onabort = () => reject(transaction.error ?? new Error("broken off"));
    });
    end.catch(() => {}); // handled below if work fails first
    try {
      const result = await work(...["chats", "texts"].map((name) => transaction.objectStore(name)));
      transaction.commit?.();
      await end;
      return result;
    } catch (error) {
      try {
        transaction.abort();
      } catch {} // already aborted
      throw transaction.error ?? error;
    }
  }

  const read = async (work) => within(await database(), "readonly", work);

  // Writes run one after the other, in order.
  let last = Promise.resolve();
  function write(work) {
    const written = last.then(work);
    last = written.catch(() => {});
    written.then(() => notify(true), () => notify(false));
    return written;
  }
  const change = async (work) => within(await database(), "readwrite", work);

  // Notifies this tab of every change, and other tabs of changes made here.
  let channel = null;
  try {
    channel = new BroadcastChannel("speculation:chats");
    channel.onmessage = () => notify(false);
  } catch (error) {
    console.warn(error);
  }
  function notify(isOurs) {
    document.dispatchEvent(new Event("chats-changed"));
    if (isOurs) channel?.postMessage("");
  }
  window.addEventListener("storage", ({ key }) => {
    if (key !== SWITCH) return;
    if (savesChats()) notify(false);
    else write(clear).catch(console.warn); // including what this tab has just saved
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

  // Chats that earlier versions saved in localStorage

  const OLD = "speculation:chats";
  const legacyKey = (name) => `speculation:chat:${name}`;

  function legacyChats() {
    try {
      const found = JSON.parse(local.getItem(OLD) ?? "[]");
      return Array.isArray(found) ? found.filter(isChat) : [];
    } catch (error) {
      console.warn(error);
      return [];
    }
  }

  // Each chat is deleted there once it is in the database. After an interruption, or if an older version
  // ran in between, the database may have a chat of that name. If their texts differ, both stay.
  let migrationError = "";
  async function migrate(database) {
    let failed = null;
    for (const chat of legacyChats()) {
      try {
        await within(database, "readwrite", async (chats, texts) => {
          const there = await done(texts.get(chat.name));
          const text = local.getItem(legacyKey(chat.name)); // null if another tab was faster
          if (text === null || text === there) return;
          const name = there === undefined ? chat.name : newName();
          await put(chats, texts, { ...chat, name, version: newName() }, text);
        });
        local.removeItem(legacyKey(chat.name));
        local.setItem(OLD, JSON.stringify(legacyChats().filter(({ name }) => name !== chat.name)));
      } catch (error) {
        console.warn(error);
        failed = error;
      }
    }
    const left = legacyChats().length;
    if (!left) local.removeItem(OLD);
    migrationError =
      failed && left
        ? `${left} chats of earlier versions could not be imported: ${reason(failed)}`
        : "";
  }

  // Space

  // In the same transaction as the save, so that the limit always holds.
  async function dropBeyondLimit(chats, texts) {
    if ((await done(chats.count())) <= MAX_CHATS) return [];
    const beyond = (await all(chats)).slice(MAX_CHATS);
    for (const { name } of beyond) await drop(chats, texts, name);
    return beyond;
  }

  // If there is no space, deletes the oldest chats until there is, each in its own transaction: deleting
  // frees space only for later ones. If that does not help, they are put back.
  let isFull = false; // then it is not tried again
  async function makeRoom(size, name, work) {
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

  // Returns the chats that no longer fit.
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
  function requestPersistence() {
    // Only in Chromium, which decides by itself: Firefox would ask the user.
    if (!isAsked && navigator.userAgentData) navigator.storage?.persist?.().catch(console.warn);
    isAsked = true;
  }

  return {
    newName,
    isDate,
    savesChats,
    reason,

    // Throws if nothing can be saved; else returns what could not be migrated, in words.
    check: async () => {
      await database();
      return migrationError;
    },

    // Latest first, without their texts.
    list: () => read(all),

    text: (name) => read((chats, texts) => done(texts.get(name))),

    // { chat, text }, or undefined.
    read: (name) =>
      read(async (chats, texts) => {
        const chat = await done(chats.get(name));
        const text = await done(texts.get(name));
        return chat && text ? { chat: repaired(chat), text } : undefined;
      }),

    // Saves a tab's chat, which had the text `before` or one of the versions. If another tab has changed
    // the chat, both stay and this one gets a new name. Returns its name, null if chats are not to be
    // saved, and `gone`, the chats deleted for space. Errors have `gone` too.
    save: ({ name, versions }, { title, version, before }, text) =>
      write(() =>
        makeRoom(text.length, name, () =>
          change(async (chats, texts) => {
            if (!savesChats()) return { name: null, gone: [] };
            const found = await done(chats.get(name));
            const isOurs =
              !found || versions.includes(found.version) || (await done(texts.get(name))) === before;
            const chat = { name: isOurs ? name : newName(), title, at: Date.now(), version };
            if (isOurs && found?.named) Object.assign(chat, { title: found.title, named: true });
            await put(chats, texts, chat, text);
            return { name: chat.name, gone: await dropBeyondLimit(chats, texts) };
          }),
        ).then((result) => (requestPersistence(), result)),
      ),

    // Adds an imported chat; it replaces one of its name only if it is newer. Returns what was done.
    add: (chat, text) =>
      write(() =>
        change(async (chats, texts) => {
          const found = await done(chats.get(chat.name));
          if (found && repaired(found).at >= chat.at) return "known";
          if (!found && (await done(chats.count())) >= MAX_CHATS) return "beyond";
          await put(chats, texts, { ...chat, version: newName() }, text);
          return "added";
        }),
      ),

    rename: (name, title, named) =>
      write(() =>
        change(async (chats) => {
          const chat = await done(chats.get(name));
          if (chat) await done(chats.put({ ...chat, title, named })); // unless another tab deleted it
        }),
      ),

    remove: (name) => write(() => change((chats, texts) => drop(chats, texts, name))),

    // The settings that new tabs start with, as JSON. They are saved only if chats are.
    fields: () => (savesChats() ? local.getItem(FIELDS) : null),
    saveFields: (text) => savesChats() && local.setItem(FIELDS, text),

    // Switches saving on or off; off deletes the saved chats and settings.
    setSaving: (on) => {
      if (on) local.removeItem(SWITCH);
      else {
        local.setItem(SWITCH, "no");
        local.removeItem(FIELDS);
      }
      return on ? Promise.resolve() : write(clear);
    },
  };
})();
