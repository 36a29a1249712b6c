// Keeps a page live. The server rendered it; here values change in place, rows are cloned from its templates,
// and whatever comes from a job or a key is only ever set as text.

import { ago, indented, look, number, setNow, size, span, took, visible } from "./format.js";
import { on, start as listen } from "./live.js";
import { start as draw } from "./chart.js";

const page = document.documentElement.dataset.page;
const byId = (id) => document.getElementById(id);
const row = (kind, id) => document.querySelectorAll(`[data-${kind}="${CSS.escape(id)}"]`);

async function ask(path) {
  const answer = await fetch(`/api/v1/${path}`);
  if (!answer.ok) throw new Error(`${path} answered ${answer.status}`);
  return answer.json();
}

function set(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// What a field shows that is not just its value.
const derived = {
  tries: (job) => (job.max_attempts === undefined ? "" : `${job.attempts}/${job.max_attempts}`),
  took: (job) => took(job),
  note: (job) => (job.status === "running" ? job.message : (job.status !== "done" && job.error) || job.message),
  percent: (job) => `${Math.round(job.progress * 100)} %`,
  process: ({ pid, host }) => (pid > 0 && host ? `${pid} on ${host}` : ""),
};

// How a value is shown.
const ways = {
  number: (node, value) => set(node, number(value)),
  ms: (node, value) => set(node, value === undefined || value === null ? "–" : span(value)),
  size: (node, value) => set(node, size(value)),
  ago(node, value) {
    if (!value) return;
    node.setAttribute("datetime", value);
    node.title = value;
    set(node, ago(value));
  },
  status(node, value, thing) {
    const word = thing.run_at === undefined ? value : look(thing);
    node.dataset.s = word;
    set(node, word);
  },
  plain(node, value) {
    node.dataset.s = value;
    set(node, visible(value));
  },
  progress(node, value, job) {
    node.value = value;
    node.hidden = node.dataset.always === undefined && job.status !== "running";
  },
  job(node, value) {
    node.href = `/jobs/${encodeURIComponent(value)}`;
    set(node, String(value));
  },
  kind(node, value) {
    node.href = `/jobs?kind=${encodeURIComponent(value)}`;
    set(node, value);
  },
  queue(node, value) {
    node.href = `/jobs?queue=${encodeURIComponent(value)}`;
    set(node, value);
  },
};

function fill(root, thing) {
  for (const node of root.querySelectorAll("[data-f]")) {
    const name = node.dataset.f;
    const value = name in derived ? derived[name](thing) : thing[name];
    const way = ways[node.dataset.b];
    if (way) way(node, value, thing);
    else if (value !== undefined || name in derived) set(node, visible(value ?? (node.tagName === "DD" ? "–" : "")));
  }
  const state = thing.status ?? thing.mode;
  for (const node of root.querySelectorAll("[data-when]")) node.hidden = !node.dataset.when.split(" ").includes(state);
  root.thing = thing;
}

function clone(template) {
  return byId(template).content.firstElementChild.cloneNode(true);
}

// Nobody has rows move under the pointer or the focus.
const isInUse = (node) => node.matches(":hover") || node.contains(document.activeElement);

function begun(name) {
  for (const node of document.querySelectorAll(`[data-until="${name}"]`)) node.remove();
}

// --- jobs ---

const jobs = byId("jobs");
const newer = byId("newer");
const unseen = new Set();

function fits(job) {
  const query = new URLSearchParams(jobs.dataset.query);
  if (jobs.dataset.first === undefined || query.has("q")) return false;
  const wanted = (name, value) => !query.has(name) || query.get(name) === value;
  return wanted("status", job.status) && wanted("queue", job.queue) && wanted("kind", job.kind) &&
    (!query.has("tag") || (job.tags ?? []).includes(query.get("tag")));
}

function newJob(job) {
  if (!fits(job)) {
    unseen.delete(job.id);
  } else if (jobs.rows.length > 0 && job.id < Number(jobs.rows[0].dataset.job)) {
    return; // it was moved into the list from further down
  } else {
    unseen.add(job.id);
  }
  if (newer === null) return;
  newer.hidden = unseen.size === 0;
  set(newer, `▲ ${unseen.size} new`);
}

const news = byId("news");
const told = new Map([...(news?.children ?? [])].map(({ dataset }) => [Number(dataset.job), dataset.status]));

function tell(job) {
  if (news === null || job.gone || told.get(job.id) === job.status || isInUse(news)) return;
  told.set(job.id, job.status);
  begun("news");
  const line = clone("news-row");
  line.dataset.job = job.id;
  fill(line, job);
  news.prepend(line);
  while (news.children.length > 12) news.lastElementChild.remove();
  if (told.size > 1000) told.clear();
}

// A page that shows what is hidden elsewhere stays as it is.
const one = document.querySelector("#job:not([data-still])");

// JSON whose numbers stay as they were written, where the browser can do that.
function exact(text) {
  const keep = (_, value, context) => (typeof value === "number" && context?.source && JSON.rawJSON ? JSON.rawJSON(context.source) : value);
  return JSON.parse(text, keep);
}

// Its log and its result are too long for the stream.
let reading = false;
let stale = false;
async function read() {
  if (reading) {
    stale = true;
    return;
  }
  reading = true;
  try {
    const answer = await fetch(`/api/v1/jobs/${one.dataset.job}`);
    if (answer.status === 404) return gone(one);
    const text = await answer.text();
    const job = JSON.parse(text);
    job.result = job.result === null ? null : indented(JSON.stringify(exact(text).result));
    const log = one.querySelector('[data-f="log"]');
    const atEnd = log.scrollTop + log.clientHeight >= log.scrollHeight - 4;
    fill(one, job);
    for (const section of one.querySelectorAll("[data-has]")) section.hidden = !job[section.dataset.has];
    if (atEnd) log.scrollTop = log.scrollHeight;
  } finally {
    setTimeout(() => {
      reading = false;
      if (stale) {
        stale = false;
        read().catch(() => {});
      }
    }, 250);
  }
}

function gone(node) {
  node.classList.add("gone");
  for (const button of node.querySelectorAll("button, summary")) {
    button.disabled = true;
  }
  for (const badge of node.querySelectorAll('.badge[data-f="status"]')) {
    badge.dataset.s = "gone";
    set(badge, "deleted");
  }
}

function job(told) {
  if (one !== null && one.dataset.job === String(told.id)) {
    read().catch(() => {});
    return;
  }
  tell(told);
  const rows = jobs === null ? [] : jobs.querySelectorAll(`tr[data-job="${CSS.escape(told.id)}"]`);
  for (const tr of rows) {
    if (told.gone) gone(tr);
    else fill(tr, told);
  }
  if (rows.length === 0 && jobs !== null && !told.gone) newJob(told);
}

// --- the rest ---

function stats(now) {
  for (const node of document.querySelectorAll("[data-stat]")) {
    const value = node.dataset.stat.split(".").reduce((thing, name) => thing?.[name], now);
    // What cannot be read now is not told.
    if (value === undefined) set(node, "–");
    else ways[node.dataset.b](node, value);
  }
}

function change(changes) {
  const table = byId("changes");
  if (table === null) return;
  begun("changes");
  for (const each of changes) {
    const tr = clone("change-row");
    const text = (name) => each[name] ?? (each[`${name}_b64`] === undefined ? "" : `base64 ${each[`${name}_b64`]}`);
    const value = text("value");
    const cut = each.bytes > value.length && each.value !== undefined ? `${value}…` : value;
    fill(tr, { revision: String(each.revision), type: each.type, key: text("key"), value: cut });
    table.prepend(tr);
  }
  while (table.rows.length > Number(table.dataset.most)) table.deleteRow(-1);
}

// The buttons and links of a new row are for it.
function address(tr, id) {
  for (const [nodes, name] of [["form", "action"], ["a[href]", "href"]]) {
    for (const node of tr.querySelectorAll(nodes)) {
      node.setAttribute(name, node.getAttribute(name).replace("%7Bid%7D", () => encodeURIComponent(id)));
    }
  }
  for (const node of tr.querySelectorAll("[aria-label]")) {
    node.setAttribute("aria-label", node.getAttribute("aria-label").replace("{id}", () => id));
  }
}

// A row for what was not there when the page was made, if there is room for it.
function add(kind, id, name) {
  const table = byId(`${kind}-rows`);
  if (table === null || row(kind, id).length > 0 || table.rows.length >= Number(table.dataset.most ?? Infinity)) return;
  const tr = clone(`${kind}-row`);
  tr.dataset[kind] = id;
  address(tr, name);
  table.append(tr);
  begun(kind);
  byId(`${kind}-there`).hidden = false;
}

function queue(thing) {
  if (thing.gone) return row("queue", thing.name).forEach((node) => node.remove());
  add("queue", thing.name, thing.name);
  row("queue", thing.name).forEach((node) => fill(node, thing));
}

function watcher(thing) {
  if (thing.gone) return row("watcher", thing.name).forEach(gone);
  // One that has come back has its buttons again.
  for (const node of row("watcher", thing.name)) if (node.classList.contains("gone")) node.remove();
  add("watcher", thing.name, thing.name);
  const prefix = thing.prefix ?? `base64 ${thing.prefix_b64}`;
  row("watcher", thing.name).forEach((node) => fill(node, { ...thing, prefix }));
}

function worker(thing) {
  const table = byId("workers");
  if (table === null) return;
  if (thing.gone) return row("worker", thing.id).forEach((node) => node.remove());
  if (row("worker", thing.id).length === 0) {
    const tr = clone("worker-row");
    tr.dataset.worker = thing.id;
    address(tr, thing.id);
    table.append(tr);
    begun("workers");
    byId("workers-there").hidden = false;
  }
  for (const tr of row("worker", thing.id)) {
    fill(tr, thing);
    tr.querySelector("[data-beats]").hidden = !thing.beats;
  }
}

function supervisor({ name, host, halted, report, gone }) {
  const table = byId("supervisors");
  if (table === null) return;
  if (gone) return row("supervisor", name).forEach((node) => node.remove());
  if (row("supervisor", name).length === 0) {
    const tr = clone("supervisor-row");
    tr.dataset.supervisor = name;
    table.append(tr);
    byId("kept").hidden = false;
  }
  const failure = report?.last_exit === undefined ? "" : `${report.last_exit}\n${report.stderr ?? ""}`;
  const shown = {
    place: `${name} on ${host}`,
    state: report?.state ?? (halted ? "terminated" : "elsewhere"),
    queues: (report?.queues ?? []).join(", "),
    balance: report?.balance ?? "",
    wanted: String(report?.wanted ?? ""),
    bounds: report === undefined ? "" : `${report.min} to ${report.max}`,
    failure,
  };
  for (const tr of row("supervisor", name)) {
    fill(tr, shown);
    tr.querySelector('[data-f="failure"]').hidden = failure === "";
  }
  const choice = byId("start-queue");
  const known = new Set([...choice.options].map(({ value }) => value));
  for (const queue of report?.queues ?? []) if (!known.has(queue)) choice.append(new Option(queue));
}

// What is wrong with the ids of a watcher: read when it changes, once a second at most.
const asked = new Map();
function troubles({ name, gone }) {
  if (page !== "watchers" || gone || asked.has(name)) return;
  asked.set(name, setTimeout(async () => {
    asked.delete(name);
    const found = await ask(`watchers/${encodeURIComponent(name)}?limit=20`).catch(() => null);
    const [head] = row("watcher", name);
    if (found === null || head === undefined) return;
    const rows = found.troubles.map((trouble) => {
      const why = (trouble.unreadable ?? []).map(({ key_type, error }) => `cannot read ${key_type}: ${error}`);
      const again = trouble.retry_in_ms === undefined ? "" : `, again in ${span(trouble.retry_in_ms)}`;
      if (trouble.error !== undefined) why.unshift(`failed ${trouble.failures} times${again}: ${trouble.error}`);
      const tr = clone("trouble-row");
      tr.dataset.of = name;
      fill(tr, { id: trouble.id ?? `base64 ${trouble.id_b64}`, why: why.join("\n") });
      return tr;
    });
    for (const old of document.querySelectorAll(`tr[data-of="${CSS.escape(name)}"]`)) old.remove();
    head.after(...rows);
  }, 1000));
}

// How fast a stage goes, by what was done when it was last told.
const paces = new Map();
const called = ({ entity, stage }) => `${JSON.stringify(entity)} ${JSON.stringify(stage)}`;
function pace(stage) {
  const name = called(stage);
  if (stage.gone) {
    paces.delete(name);
    return row("stage", name).forEach((node) => node.remove());
  }
  const last = paces.get(name);
  const at = Date.now();
  const rate = last && at > last.at ? Math.round(((stage.done - last.done) * 1000) / (at - last.at)) : undefined;
  if (last === undefined || at - last.at >= 900) paces.set(name, { at, done: stage.done });
  add("stage", name, name);
  row("stage", name).forEach((node) => fill(node, rate === undefined ? stage : { ...stage, rate }));
}

on("job", job);
on("queue", queue);
on("worker", worker);
on("supervisor", supervisor);
on("stage", pace);
on("watcher", watcher);
on("watcher", troubles);
on("kv", ({ changes }) => change(changes));
on("stats", stats);

// The same as they are listed.
function everybody({ workers, supervisors }) {
  for (const it of workers) {
    worker({ ...it, queue: it.queues.join(", "), jobs: it.running.length, capacity: it.slots.capacity, silent_ms: it.seen_ms, beats: true });
  }
  const known = new Set(workers.map(({ id }) => id));
  for (const tr of document.querySelectorAll("[data-worker]")) {
    // Who only takes jobs is not listed.
    const beats = tr.querySelector("[data-beats]")?.hidden === false;
    if (beats && !known.has(tr.dataset.worker)) worker({ id: tr.dataset.worker, gone: true });
  }
  const there = new Set(supervisors.map(({ name }) => name));
  for (const { dataset } of document.querySelectorAll("[data-supervisor]")) {
    if (!there.has(dataset.supervisor)) supervisor({ name: dataset.supervisor, gone: true });
  }
  supervisors.forEach(supervisor);
}

// What may have changed before the stream began, or was missed, is read anew.
async function refresh() {
  const reads = [];
  if (document.querySelector("[data-stat]") !== null) reads.push(ask("overview").then(stats));
  if (byId("queue-rows") !== null) {
    reads.push(ask("queues").then(({ queues }) => {
      const there = new Set(queues.map(({ name }) => name));
      for (const { dataset } of document.querySelectorAll("[data-queue]")) {
        if (!there.has(dataset.queue)) queue({ name: dataset.queue, gone: true });
      }
      queues.forEach(queue);
    }));
  }
  if (one !== null) reads.push(read());
  if (news !== null) reads.push(ask("jobs?limit=12").then((list) => list.jobs.reverse().forEach(tell)));
  if (jobs !== null) {
    const query = new URLSearchParams(jobs.dataset.query);
    query.set("limit", jobs.dataset.limit);
    reads.push(ask(`jobs?${query}`).then((list) => list.jobs.forEach(job)));
  }
  if (page === "workers") reads.push(ask("workers").then(everybody));
  if (page === "watchers") reads.push(ask("watchers").then(({ watchers }) => watchers.forEach(watcher)));
  if (page === "stages") {
    reads.push(ask("stages").then(({ stages }) => {
      const there = new Set(stages.map(called));
      for (const node of document.querySelectorAll("[data-stage]")) {
        if (!there.has(node.dataset.stage)) node.remove();
      }
      stages.forEach(pace);
    }));
  }
  await Promise.all(reads);
}

on("hello", ({ now }) => {
  setNow(now);
  refresh().catch(() => {});
});
on("reset", () => refresh().catch(() => {}));

// Times go on by themselves.
setInterval(() => {
  for (const node of document.querySelectorAll("time[datetime]")) set(node, ago(node.getAttribute("datetime")));
  for (const node of document.querySelectorAll('[data-f="took"]')) {
    const { thing } = node.closest("[data-job]") ?? {};
    if (thing?.status === "running") set(node, took(thing));
  }
  for (const node of document.querySelectorAll('.badge[data-s="scheduled"], .badge[data-s="retrying"]')) {
    const { thing } = node.closest("[data-job]") ?? {};
    if (thing !== undefined) ways.status(node, thing.status, thing);
  }
  for (const [name, { at }] of paces) {
    if (Date.now() - at > 3000) row("stage", name).forEach((node) => set(node.querySelector('[data-f="rate"]'), "0"));
  }
}, 1000);

// --- forms ---

const outcome = byId("outcome");
const announce = (text, bad) => {
  outcome.classList.toggle("bad", bad);
  outcome.classList.toggle("notice", !bad);
  set(outcome, text);
};

document.addEventListener("submit", async (event) => {
  const form = event.target;
  if (!form.classList.contains("action")) return;
  event.preventDefault();
  const button = form.querySelector("button");
  if (button.disabled) return;
  button.disabled = true;
  try {
    const answer = await fetch(form.action, {
      method: "POST",
      headers: { Accept: "application/json" },
      body: new URLSearchParams(new FormData(form)),
    });
    const told = await answer.json();
    announce(answer.ok ? told.said : `${told.error.message}${told.error.hint ? `: ${told.error.hint}` : ""}`, !answer.ok);
    form.closest("details")?.removeAttribute("open");
    if (answer.ok && form.classList.contains("bulk")) refresh().catch(() => {});
  } catch {
    announce("The server could not be reached: nothing may have been done.", true);
  } finally {
    button.disabled = false;
  }
});

draw();
listen().catch(() => {});
