// Holds the one stream of events that all tabs of a browser share: a browser has six connections to a server,
// and a stream of its own for each tab would use them up.

const ports = new Set();
let source = null;
let state = "waiting";
let hello = null;

function tell(message) {
  for (const port of ports) port.postMessage(message);
}

function say(next) {
  state = next;
  tell({ state });
}

function open() {
  if (source !== null) return;
  source = new EventSource("/api/v1/events");
  source.addEventListener("open", () => say("live"));
  source.addEventListener("error", async () => {
    say("waiting");
    if (source.readyState !== EventSource.CLOSED) return; // it comes back by itself
    source = null;
    const session = await fetch("/api/v1/session").catch(() => null);
    // Trying on would not help; a page that is loaded anew does.
    if (session?.status === 401) return say("signed out");
    setTimeout(open, 1000 + Math.random() * 1000);
  });
  for (const event of ["hello", "reset", "job", "queue", "worker", "supervisor", "stage", "watcher", "kv", "stats"]) {
    source.addEventListener(event, ({ data }) => {
      if (event === "hello") hello = data;
      tell({ event, data });
    });
  }
}

function close() {
  if (ports.size > 0 || source === null) return;
  source.close();
  source = null;
  hello = null;
  state = "waiting";
}

function join(port) {
  port.onmessage = ({ data }) => {
    if (data === "bye") {
      ports.delete(port);
      close();
    } else if (data === "hi") {
      ports.add(port);
      port.postMessage({ state });
      // Who comes later is greeted, too: it reads what it shows anew.
      if (state === "live" && hello !== null) port.postMessage({ event: "hello", data: hello });
      open();
    }
  };
}

if ("onconnect" in self) self.onconnect = ({ ports: [port] }) => join(port);
// Where there are no shared workers this is loaded by a page, which joins itself.
export { join };
