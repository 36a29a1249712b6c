// Charts, drawn by uPlot in the colours of the page, and drawn anew when there is more to show.

import uPlot from "./vendor/uPlot.esm.js";
import { number, span } from "./format.js";

const HEIGHT = 220;
const EVERY = 5000; // milliseconds between two looks
const HUES = ["--accent", "--good", "--wait", "--scheduled", "--bad", "--paused", "--cancelled", "--muted"];

const WHOLE = Array.from({ length: 8 }, (_, n) => [1, 2, 5].map((step) => step * 10 ** n)).flat();

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const time = (ms) => (ms === null || ms === undefined ? "–" : span(ms));

// What each chart shows: names, colours, values.
const KINDS = {
  throughput: ({ all }) => ({
    bars: true,
    lines: [["done", "--good", all.done], ["failed", "--bad", all.failed]],
  }),
  run: ({ all }) => ({
    text: time,
    dots: true,
    lines: [["half within", "--accent", all.run_p50_ms], ["95 % within", "--wait", all.run_p95_ms]],
  }),
  wait: ({ all }) => ({
    text: time,
    dots: true,
    lines: [["half within", "--accent", all.wait_p50_ms], ["95 % within", "--wait", all.wait_p95_ms]],
  }),
  depth: ({ queues }) => ({
    lines: Object.entries(queues).slice(0, HUES.length).map(([name, points], n) => [name, HUES[n], points.ready]),
  }),
  oldest: ({ all }) => ({ text: time, lines: [["oldest", "--wait", all.oldest_ms]] }),
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

async function draw(place) {
  const query = new URLSearchParams({ range: place.dataset.range });
  if (place.dataset.queue) query.set("queue", place.dataset.queue);
  const answer = await fetch(`/api/v1/stats?${query}`);
  if (!answer.ok) return;
  const stats = await answer.json();
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

export function start() {
  const places = [...document.querySelectorAll("[data-chart]")];
  if (places.length === 0) return;
  const all = () => {
    if (!document.hidden) places.forEach((place) => draw(place).catch(() => {}));
  };
  const observer = new ResizeObserver((entries) => {
    for (const { target } of entries) target.plot?.setSize({ width: target.clientWidth, height: HEIGHT });
  });
  places.forEach((place) => observer.observe(place));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    places.forEach((place) => (place.names = ""));
    all();
  });
  all();
  setInterval(all, EVERY);
}
