// Shows the store live: the numbers from the overview, the changes from a watch on all keys.
// What comes from the store is only ever set as text.

const SHOWN = 50; // changes on the page
const VALUE = 200; // characters of a value
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

async function overview() {
  const answer = await fetch("api/v1/overview");
  if (!answer.ok) throw new Error(`the overview answered ${answer.status}`);
  const now = await answer.json();
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
  if (!document.hidden && (stale || ticks % 5 === 0)) {
    stale = false;
    overview().catch(() => {});
  }
}, 1000);

follow();
