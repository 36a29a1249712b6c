// Shows the store live: the numbers from the overview, the changes from a watch on all keys, and the
// watchers, if there are any, as often as the numbers.
// What comes from the store is only ever set as text.

const SHOWN = 50; // changes on the page
const VALUE = 200; // characters of a value
const TROUBLES = 20; // ids shown of those that a watcher has trouble with
const SIGNS = { put: "✓ put", delete: "✕ delete", expire: "◌ expire" };

const line = document.getElementById("line");
const changes = document.getElementById("changes");
const nothing = document.getElementById("nothing");
const numbers = new Intl.NumberFormat("en");

function say(state, text) {
  line.dataset.state = state;
  line.textContent = text;
}

function size(bytes) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (bytes >= 1000 && unit < units.length - 1) {
    bytes /= 1000;
    unit += 1;
  }
  return `${unit === 0 ? bytes : bytes.toFixed(1)} ${units[unit]}`;
}

async function ask(path) {
  const answer = await fetch(`api/v1/${path}`);
  if (!answer.ok) throw new Error(`${path} answered ${answer.status}`);
  return answer.json();
}

// What changes something goes with the token of this session.
async function tell(path) {
  const { csrf } = await ask("session");
  return fetch(`api/v1/${path}`, { method: "POST", headers: { "X-Vedetta-CSRF": csrf } });
}

async function overview() {
  const [now] = await Promise.all([ask("overview"), watchers(), stages().catch(noStages)]);
  for (const tile of document.querySelectorAll("[data-tile]")) {
    const number = now[tile.dataset.tile];
    tile.textContent = tile.dataset.tile === "size" ? size(number) : numbers.format(number);
  }
  return now;
}

function cell(name, text) {
  const td = document.createElement("td");
  td.className = name;
  td.textContent = text;
  return td;
}

// Control characters and those that turn the direction of text are shown, not obeyed.
function visible(text) {
  return text.replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200e\u200f\u202a-\u202e\u2066-\u2069]/g,
    (c) => `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`);
}

function text(entry, name) {
  const found = entry[name] ?? (entry[`${name}_b64`] === undefined ? "" : `base64 ${entry[`${name}_b64`]}`);
  return visible(found.length > VALUE ? `${found.slice(0, VALUE)}…` : found);
}

function row(revision, event) {
  const tr = document.createElement("tr");
  const what = cell("what", SIGNS[event.type] ?? event.type);
  what.dataset.type = event.type;
  tr.append(cell("number", revision), what, cell("key", text(event, "key")), cell("value", text(event, "value")));
  return tr;
}

function watcherRow(watcher) {
  const tr = document.createElement("tr");
  const phase = cell("what", watcher.phase);
  phase.dataset.type = watcher.phase;
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = "Resync";
  button.dataset.watcher = watcher.name;
  button.setAttribute("aria-label", `Resync ${watcher.name}`);
  const action = cell("what", "");
  action.append(button);
  const count = (name) => cell("number", numbers.format(watcher[name]));
  const failing = count("failing");
  failing.dataset.type = watcher.failing > 0 ? "some" : "none";
  tr.append(cell("key", watcher.name), cell("key", text(watcher, "prefix")), phase, count("ids"), count("running"),
    count("waiting"), failing, cell("value", text(watcher, "last_error")), action);
  return tr;
}

function troubleRow(trouble) {
  const why = (trouble.unreadable ?? []).map(({ key_type, error }) => `cannot read ${key_type}: ${error}`);
  if (trouble.error !== undefined) {
    const wait = (trouble.retry_in_ms / 1000).toFixed(1);
    why.unshift(`failed ${trouble.failures} times, again in ${wait} s: ${trouble.error}`);
  }
  const td = cell("trouble", `${text(trouble, "id")}: ${visible(why.join("\n").slice(0, 5 * VALUE))}`);
  td.colSpan = 9;
  const tr = document.createElement("tr");
  tr.append(td);
  return tr;
}

// Something runs or fails, which changes without a change in the store.
let busy = false;
let working = false;

async function watchers() {
  const { watchers: all } = await ask("watchers");
  const rows = [];
  for (const watcher of all) {
    rows.push(watcherRow(watcher));
    if (watcher.failing + watcher.unreadable > 0) {
      const { troubles } = await ask(`watchers/${encodeURIComponent(watcher.name)}?limit=${TROUBLES}`);
      rows.push(...troubles.map(troubleRow));
    }
  }
  busy = all.some(({ phase, running, waiting, failing }) => running + waiting + failing > 0 || phase !== "following");
  const section = document.getElementById("watchers");
  const focused = document.activeElement?.dataset.watcher;
  section.hidden = all.length === 0;
  section.querySelector("tbody").replaceChildren(...rows);
  if (focused !== undefined) section.querySelector(`button[data-watcher="${CSS.escape(focused)}"]`)?.focus();
}

document.getElementById("watchers").addEventListener("click", async ({ target }) => {
  const name = target.dataset.watcher;
  if (name === undefined) return;
  target.disabled = true; // until the row is drawn again
  // If it cannot be asked, the line above the page says so.
  await tell(`watchers/${encodeURIComponent(name)}/resync`).catch(() => {});
  stale = true;
});

// What was done when it was last asked, to tell how fast it goes.
let lastDone = new Map();

function stageRow(stage, rate) {
  const tr = document.createElement("tr");
  const count = (name) => cell("number", numbers.format(stage[name]));
  const alarming = (name) => {
    const td = count(name);
    td.dataset.type = stage[name] > 0 ? "some" : "none";
    return td;
  };
  const oldest = stage.oldest_due_ms === undefined ? "" : `${(stage.oldest_due_ms / 1000).toFixed(1)} s`;
  tr.append(cell("key", visible(stage.entity)), cell("key", visible(stage.stage)), count("records"), count("due"),
    count("held"), alarming("failing"), alarming("parked"), cell("number", oldest), count("done"),
    cell("number", rate === undefined ? "" : numbers.format(Math.round(rate))), cell("what", ""));
  return tr;
}

// A record that was set aside, with a way to have it tried again.
function parkedRow(entity, record) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = "Retry";
  button.dataset.retry = [entity, record.stage, record.id].map(encodeURIComponent).join("/");
  button.setAttribute("aria-label", `Retry ${record.stage} of ${entity} ${record.id}`);
  const td = cell("trouble", `${visible(record.stage)} ${visible(record.id)}: failed ${record.failures} times: ${text(record, "error")}`);
  td.colSpan = 10;
  const action = cell("what", "");
  action.append(button);
  const tr = document.createElement("tr");
  tr.append(td, action);
  return tr;
}

function noteRow(note) {
  const td = cell("trouble", visible(note));
  td.colSpan = 11;
  const tr = document.createElement("tr");
  tr.append(td);
  return tr;
}

async function stages() {
  const { stages: all } = await ask("stages");
  const now = Date.now();
  const done = new Map();
  const rows = [];
  for (const stage of all) {
    const name = JSON.stringify([stage.entity, stage.stage]);
    const last = lastDone.get(name);
    // It is counted every second.
    const isOld = last === undefined || now - last.at >= 1000;
    done.set(name, isOld ? { at: now, done: stage.done, rate: last && (stage.done - last.done) / (now - last.at) * 1000 } : last);
    rows.push(stageRow(stage, done.get(name).rate));
    if (stage.parked > 0) {
      const query = `parked=true&limit=${TROUBLES}&stage=${encodeURIComponent(stage.stage)}`;
      const { records } = await ask(`stages/${encodeURIComponent(stage.entity)}?${query}`);
      rows.push(...records.map((record) => parkedRow(stage.entity, record)));
      const left = stage.parked - records.length;
      if (left > 0) rows.push(noteRow(`and ${numbers.format(left)} more: vedetta stage list ${stage.entity} --parked`));
    }
  }
  lastDone = done;
  // Programs elsewhere work on them: nothing here says when they change.
  working = all.length > 0;
  const section = document.getElementById("stages");
  const focused = document.activeElement?.dataset.retry;
  section.hidden = all.length === 0;
  section.querySelector("tbody").replaceChildren(...rows);
  if (focused !== undefined) section.querySelector(`button[data-retry="${CSS.escape(focused)}"]`)?.focus();
}

// Their database may be another one than the store's, and away.
function noStages(error) {
  const section = document.getElementById("stages");
  section.hidden = false;
  section.querySelector("tbody").replaceChildren(noteRow(`The stages cannot be read now: ${error.message}`));
}

document.getElementById("stages").addEventListener("click", async ({ target }) => {
  const record = target.dataset.retry;
  if (record === undefined) return;
  target.disabled = true; // until the row is drawn again
  await tell(`stages/${record}/retry`).catch(() => {});
  stale = true;
});

// Messages wait here for the next frame; of a flood only the last are drawn.
let waiting = [];
let stale = false;

function draw() {
  const rows = waiting.slice(-SHOWN).map(([revision, event]) => row(revision, event));
  waiting = [];
  changes.prepend(...rows.reverse());
  while (changes.rows.length > SHOWN) changes.deleteRow(-1);
  nothing.hidden = changes.rows.length > 0;
}

function take(message) {
  const { revision, events } = JSON.parse(message.data);
  if (waiting.length === 0) requestAnimationFrame(draw);
  for (const event of events.slice(-SHOWN)) waiting.push([revision, event]);
  waiting = waiting.slice(-SHOWN);
  stale = true;
}

async function follow() {
  let now;
  try {
    now = await overview();
  } catch {
    say("waiting", "no connection, trying again");
    setTimeout(follow, 1000);
    return;
  }
  changes.replaceChildren();
  // A little of the past too, so the page does not start empty.
  const from = Math.max(now.oldest, now.revision - SHOWN + 1, 0);
  const watch = new EventSource(`api/v1/watch?prefix=&from=${from}`);
  const again = () => {
    watch.close();
    setTimeout(follow, 1000);
  };
  watch.addEventListener("open", () => {
    say("live", "live");
    overview().catch(() => {}); // it counts this watcher too
  });
  watch.addEventListener("kv", take);
  watch.addEventListener("compacted", again);
  watch.addEventListener("failed", again);
  watch.addEventListener("error", () => {
    say("waiting", "no connection, trying again");
    if (watch.readyState === EventSource.CLOSED) again();
  });
}

// The numbers at most once a second, at once after changes and now and then without.
let ticks = 0;
setInterval(() => {
  ticks += 1;
  if (!document.hidden && (stale || busy || working || ticks % 5 === 0)) {
    stale = false;
    overview().catch(() => {});
  }
}, 1000);

follow();
