// What is measured of a queue, the same for each. `queue.mjs` beside it says how that is done with one.
//
//   node measure.mjs runs URL JOBS BEHIND LATER    → jobs per second; behind them wait more, and more for later
//   node measure.mjs single URL JOBS 0 LATER       → jobs per second added one by one, by 20 callers
//   node measure.mjs bulk URL JOBS 0 LATER         → jobs per second added a thousand at a time
//   node measure.mjs latency URL SAMPLES 0 LATER   → milliseconds from the call that adds a job, and from its
//                                                    return, to the start of the job: p50 p99 p50 p99

import { setTimeout as sleep } from "node:timers/promises";
import { open } from "./queue.mjs";

const [what, url, ...counts] = process.argv.slice(2);
const queue = await open(url, what);
await { runs, single, bulk, latency }[what](...counts.map(Number));
// Nobody needs it to end in order: the database goes with it.
process.exit(0);

async function runs(jobs, behind = 0, later = 0) {
  await fill(jobs + behind);
  await putOff(later);
  await settleDown();

  let ran = 0;
  const began = performance.now();
  await queue.start(() => void ran++);
  while (ran < jobs) await sleep(1);
  // What waits behind them is begun before they are all over.
  while (!behind && (await queue.isAnyLeft(jobs))) await sleep(1);
  const seconds = (performance.now() - began) / 1e3;
  if (!behind && ran !== jobs) throw new Error(`${ran} jobs ran, of ${jobs}`);
  console.log(jobs / seconds);
}

async function fill(jobs, at) {
  for (const ids of batches(jobs, 10_000)) await queue.addMany(ids, at);
}

async function putOff(later) {
  await fill(later, new Date(Date.now() + 24 * 3600e3));
}

async function settleDown() {
  await queue.query("VACUUM ANALYZE");
  await queue.query("CHECKPOINT");
}

async function single(jobs, _, later = 0) {
  if (later) await putOff(later).then(settleDown);
  let next = 0;
  const caller = async () => {
    while (next < jobs) await queue.add(next++);
  };
  const began = performance.now();
  await Promise.all(Array.from({ length: 20 }, caller));
  console.log(jobs / ((performance.now() - began) / 1e3));
}

async function bulk(jobs, _, later = 0) {
  if (later) await putOff(later).then(settleDown);
  const began = performance.now();
  for (const ids of batches(jobs, 1_000)) await queue.addMany(ids);
  console.log(jobs / ((performance.now() - began) / 1e3));
}

async function latency(samples, _, later = 0) {
  if (later) await putOff(later).then(settleDown);
  let started;
  await queue.start(() => started(performance.now()));
  const [fromCall, fromReturn] = [[], []];
  // The first few find connections and statements still to be made.
  for (let n = -50; n < samples; n++) {
    await sleep(5 + Math.random() * 10);
    const start = new Promise((resolve) => (started = resolve));
    const called = performance.now();
    await queue.add(n);
    const returned = performance.now();
    const at = await start;
    if (n < 0) continue;
    fromCall.push(at - called);
    fromReturn.push(Math.max(0, at - returned));
  }
  for (const times of [fromCall, fromReturn]) {
    times.sort((a, b) => a - b);
    for (const share of [0.5, 0.99]) console.log(times[Math.round((times.length - 1) * share)]);
  }
}

function* batches(jobs, size) {
  for (let first = 0; first < jobs; first += size) {
    yield Array.from({ length: Math.min(size, jobs - first) }, (_, n) => first + n);
  }
}
