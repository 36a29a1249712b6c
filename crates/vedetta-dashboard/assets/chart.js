// Charts, drawn by uPlot in the colours of the page: anew when the stream tells of new numbers, which is once a
// second, and not while the page is paused. What is said under them, for people, is as new every few seconds.

import uPlot from "./vendor/uPlot.esm.js";
import { coarse, now, number, span } from "./format.js";
import { isPaused, on } from "./live.js";

const HEIGHT = 220;
const TELL_MS = 5000; // from one sentence to the next
const HUES = ["--accent", "--good", "--wait", "--scheduled", "--bad", "--paused", "--cancelled", "--muted"];

const WHOLE = Array.from({ length: 8 }, (_, n) => [1, 2, 5].map((step) => step * 10 ** n)).flat();

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const time = (ms) => (ms === null || ms === undefined ? "–" : span(ms));

// What each chart shows: names, colours, values.
const KINDS = {
  throughput: ({ all }) => ({
    bars: true,
    lines: [["Done", "--good", all.done], ["Failed", "--bad", all.failed]],
  }),
  run: ({ all }) => ({
    text: time,
    dots: true,
    lines: [["Half within", "--accent", all.run_p50_ms], ["95 % within", "--wait", all.run_p95_ms]],
  }),
  wait: ({ all }) => ({
    text: time,
    dots: true,
    lines: [["Half within", "--accent", all.wait_p50_ms], ["95 % within", "--wait", all.wait_p95_ms]],
  }),
  depth: ({ queues }) => ({
    lines: Object.entries(queues).slice(0, HUES.length).map(([name, points], n) => [name, HUES[n], points.ready]),
  }),
  oldest: ({ all }) => ({ text: time, lines: [["Oldest", "--wait", all.oldest_ms]] }),
};

function options(width, { lines, text = number, bars = false, dots = false }) {
  const axis = { stroke: color("--muted"), grid: { stroke: color("--line"), width: 1 }, ticks: { stroke: color("--line") } };
  const series = lines.map(([label, hue], n) => ({
    label,
    stroke: color(hue),
    width: 2,
    dash: n === 1 ? [6, 3] : undefined, // told apart without colours, too
    fill: bars && n === 0 ? `${color(hue)}33` : undefined,
    points: { show: dots, size: 5, fill: color(hue) }, // what has nothing beside it is seen, too
    spanGaps: false,
    value: (_, value) => (value === null ? "–" : text(value)),
  }));
  return {
    width,
    height: HEIGHT,
    cursor: { y: false, drag: { x: false, y: false } },
    legend: { live: true },
    scales: { y: { range: (_, __, most) => [0, Math.max(most * 1.1, text === number ? 1 : 10)] } },
    axes: [axis, { ...axis, size: 64, incrs: text === number ? WHOLE : undefined, values: (_, ticks) => ticks.map((tick) => text(tick)) }],
    series: [{ value: (_, at) => (at === null ? "–" : new Date(at * 1000).toLocaleTimeString()) }, ...series],
  };
}

// What is said of each, from the steps of its table.
const sum = (values) => values.reduce((all, value) => all + value, 0);
const most = (values) => Math.max(0, ...values);
const last = (values) => values.findLast((value) => value !== null);

function lately({ half, nearly }, verb) {
  const [low, high] = [last(half), last(nearly)];
  return low === undefined || high === undefined
    ? `nothing ${verb} in this time`
    : `lately half ${verb} up to ${span(low)}, 95 % up to ${span(high)}`;
}

const SENTENCES = {
  throughput({ all, since, step_ms }, { name }) {
    const age = now() - since;
    const when = age < all.done.length * step_ms ? `since this server started, ${coarse(age)} ago` : `in the last ${name}`;
    return `${number(sum(all.done))} done and ${number(sum(all.failed))} failed ${when}`;
  },
  run: ({ all }) => lately({ half: all.run_p50_ms, nearly: all.run_p95_ms }, "ran"),
  wait: ({ all }) => lately({ half: all.wait_p50_ms, nearly: all.wait_p95_ms }, "waited"),
  depth: ({ all }) => `${number(most(all.ready))} at most`,
  oldest: ({ all }) => `${span(most(all.oldest_ms))} at most`,
};

function set(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// Has as many children as wanted. Those that are there stay: somebody may be reading them.
function fit(parent, count, tag) {
  while (parent.children.length > count) parent.lastElementChild.remove();
  while (parent.children.length < count) {
    const child = document.createElement(tag);
    if (tag === "th") child.scope = "col";
    if (tag !== "tr" && parent.children.length > 0) child.className = "number";
    parent.append(child);
  }
  return [...parent.children];
}

function tell(place, coarser) {
  const section = place.closest(".chart");
  const sentence = SENTENCES[place.dataset.chart](coarser, place.dataset);
  set(section.querySelector("p"), sentence);
  place.setAttribute("aria-label", `${section.querySelector("h2").textContent}: ${sentence}`);
  const { lines, text = number } = KINDS[place.dataset.chart](coarser);
  const table = section.querySelector("details table");
  const heads = ["From", ...lines.map(([name]) => name)];
  fit(table.tHead.rows[0], heads.length, "th").forEach((th, n) => set(th, heads[n]));
  const steps = lines.length === 0 ? 0 : coarser.all.done.length;
  fit(table.tBodies[0], steps, "tr").forEach((tr, step) => {
    const at = new Date(coarser.from + step * coarser.step_ms).toISOString().slice(11, 16);
    const row = [`${at} UTC`, ...lines.map(([, , values]) => text(values[step]))];
    fit(tr, row.length, "td").forEach((td, n) => set(td, row[n]));
  });
}

function draw(place, stats) {
  const shown = KINDS[place.dataset.chart](stats);
  if (shown.lines.length === 0) return;
  const times = stats.all.done.map((_, n) => (stats.from + n * stats.step_ms) / 1000);
  const data = [times, ...shown.lines.map(([, , values]) => values)];
  const names = JSON.stringify([shown.lines.map(([name]) => name), document.documentElement.dataset.theme]);
  if (place.plot && place.names === names) {
    place.plot.setData(data);
    return;
  }
  place.plot?.destroy();
  place.names = names;
  place.plot = new uPlot(options(place.clientWidth, shown), data, place);
}

async function read({ range, only }, step) {
  const query = new URLSearchParams({ range });
  if (only) query.set("queue", only);
  if (step) query.set("step", `${step}s`);
  const answer = await fetch(`/api/v1/stats?${query}`);
  if (!answer.ok) throw new Error(`stats answered ${answer.status}`);
  return answer.json();
}

export function start() {
  const places = [...document.querySelectorAll("[data-chart]")];
  if (places.length === 0) return;
  const [{ dataset }] = places; // all of a page show the same range
  let reading = false;
  let shown = null;
  let told = -Infinity;
  const all = () => places.forEach((place) => draw(place, shown));
  // The lines are fine, the table is for people.
  async function look() {
    if (reading) return;
    reading = true;
    const began = performance.now();
    const tells = began - told >= TELL_MS;
    try {
      const [fine, coarser] = await Promise.all([read(dataset), tells ? read(dataset, dataset.step) : null]);
      if (isPaused()) return; // it was pressed meanwhile
      shown = fine;
      all();
      if (!tells) return;
      told = began;
      places.forEach((place) => tell(place, coarser));
    } finally {
      reading = false;
    }
  }
  const observer = new ResizeObserver((entries) => {
    for (const { target } of entries) target.plot?.setSize({ width: target.clientWidth, height: HEIGHT });
  });
  places.forEach((place) => observer.observe(place));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    places.forEach((place) => (place.names = ""));
    if (shown !== null) all();
  });
  look().catch(() => {});
  on("stats", () => look().catch(() => {}));
}
