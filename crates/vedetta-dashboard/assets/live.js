// What changes, on its way to the page: from the worker that all tabs share, kept back while the page is paused,
// and handed on once a frame, the last of each thing.

const WORKER = document.documentElement.dataset.stream;
const MOST = 500; // things that wait for the page to go on

const line = document.getElementById("line");
const pause = document.getElementById("pause");
const handlers = [];
let waiting = new Map();
let drawing = false;
let paused = false;
let lost = null;
let met = false; // it was live once
let signedOut = false;

export const isPaused = () => paused;

export function on(event, handler) {
  handlers.push([event, handler]);
}

function say() {
  const state = signedOut ? "signed out" : lost === null ? (paused ? "paused" : "live") : "waiting";
  const late = lost !== null && Date.now() - lost > 5000;
  if (lost === null) met = true;
  line.hidden = false;
  line.dataset.state = state;
  line.textContent = {
    live: "live",
    paused: `paused, ${waiting.size} waiting`,
    waiting: met || late ? "no connection, trying again" : "connecting",
    "signed out": "signed out: load the page again to sign in",
  }[state];
  document.body.classList.toggle("stale", late);
}

function draw() {
  drawing = false;
  if (paused) return say();
  const now = waiting;
  waiting = new Map();
  for (const [event, data] of now.values()) {
    for (const [wanted, handler] of handlers) if (wanted === event) handler(data);
  }
}

// What an event is about: of two about the same only the last is drawn.
const about = {
  job: (data) => data.id,
  queue: (data) => data.name,
  worker: (data) => data.id,
  supervisor: (data) => data.name,
  stage: (data) => `${data.entity} ${data.stage}`,
  watcher: (data) => data.name,
  kv: (data) => data.revision,
};

function take({ state, event, data }) {
  if (state !== undefined) {
    signedOut = state === "signed out";
    lost = state === "live" ? null : (lost ?? Date.now());
    say();
    return;
  }
  const parsed = JSON.parse(data);
  waiting.set(`${event} ${about[event]?.(parsed) ?? ""}`, [event, parsed]);
  while (waiting.size > MOST) waiting.delete(waiting.keys().next().value);
  if (!drawing) {
    drawing = true;
    requestAnimationFrame(draw);
  }
}

pause.hidden = false;
pause.addEventListener("click", () => {
  paused = !paused;
  pause.setAttribute("aria-pressed", String(paused));
  pause.textContent = paused ? "Resume live" : "Pause live";
  say();
  if (!paused) draw();
});
setInterval(() => {
  if (lost !== null) say();
}, 1000);

// The one address that a script may be loaded from here.
function trusted(url) {
  if (!window.trustedTypes) return url;
  const policy = trustedTypes.createPolicy("vedetta", {
    createScriptURL(wanted) {
      if (wanted !== WORKER) throw new TypeError(`refused: ${wanted}`);
      return wanted;
    },
  });
  return policy.createScriptURL(url);
}

export async function start() {
  let port;
  if ("SharedWorker" in window) {
    port = new SharedWorker(trusted(WORKER), { type: "module", name: WORKER }).port;
  } else {
    const channel = new MessageChannel();
    const { join } = await import("./stream.js");
    join(channel.port1);
    port = channel.port2;
  }
  port.onmessage = ({ data }) => take(data);
  port.postMessage("hi");
  addEventListener("pagehide", () => port.postMessage("bye"));
  addEventListener("pageshow", ({ persisted }) => {
    if (persisted) port.postMessage("hi");
  });
}
