// How numbers, times and states are written: the same as the server writes them.

const numbers = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
// Control characters and those that turn the direction of text are shown, not obeyed.
const UNSEEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200e\u200f\u202a-\u202e\u2066-\u2069]/g;

let ahead = 0; // how far the server's clock is ahead of ours, in milliseconds

export function setNow(text) {
  ahead = Date.parse(text) - Date.now();
}

export const now = () => Date.now() + ahead;

export const number = (n) => (n === undefined || n === null ? "" : numbers.format(n).replaceAll(",", "\u202f"));

export function visible(text) {
  return String(text ?? "").replace(UNSEEN, (c) => `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`);
}

export function size(bytes) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (bytes >= 1000 && unit < units.length - 1) {
    bytes /= 1000;
    unit += 1;
  }
  return `${unit === 0 ? bytes : bytes.toFixed(1)} ${units[unit]}`;
}

export function span(ms) {
  const s = Math.floor(ms / 1000);
  if (s < 1) return `${Math.max(0, Math.round(ms))}ms`;
  if (s < 60) return `${s}.${Math.floor((ms % 1000) / 100)}s`;
  if (s < 3600) return `${Math.floor(s / 60)}m ${s % 60}s`;
  if (s < 86400) return `${Math.floor(s / 3600)}h ${Math.floor((s % 3600) / 60)}m`;
  return `${Math.floor(s / 86400)}d ${Math.floor((s % 86400) / 3600)}h`;
}

export function coarse(ms) {
  const s = Math.floor(ms / 1000);
  if (s < 60) return `${s}s`;
  if (s < 3600) return `${Math.floor(s / 60)}m`;
  if (s < 86400) return `${Math.floor(s / 3600)}h`;
  return `${Math.floor(s / 86400)}d`;
}

export function ago(text) {
  const past = now() - Date.parse(text);
  if (past < -1000) return `in ${coarse(-past)}`;
  return past < 1000 ? "now" : `${coarse(past)} ago`;
}

// The word that people are shown: of those that wait, why. Two clocks are never quite the same.
export function look(job) {
  if (job.status !== "waiting" || Date.parse(job.run_at) <= now() + 1000) return job.status;
  return job.attempts > 0 ? "retrying" : "scheduled";
}

export function took(job) {
  if (!job.started_at) return "";
  const end = job.status === "running" ? now() : job.ended_at && Date.parse(job.ended_at);
  return end ? span(end - Date.parse(job.started_at)) : "";
}

// JSON with line breaks; numbers as they were written.
export function indented(json) {
  let out = "";
  let depth = 0;
  const line = () => `\n${"  ".repeat(depth)}`;
  for (const [token] of json.matchAll(/"(?:\\.|[^"\\])*"|[{[]\s*[}\]]|[^\s]/g)) {
    if (token === "{" || token === "[") {
      depth += 1;
      out += token + line();
    } else if (token === "}" || token === "]") {
      depth = Math.max(0, depth - 1);
      out += line() + token;
    } else if (token === ",") out += token + line();
    else if (token === ":") out += ": ";
    else out += token.startsWith("{") || token.startsWith("[") ? token.replace(/\s/g, "") : token;
  }
  return out;
}
