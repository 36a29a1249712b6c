// The other side of `bench stages`: graphile-worker, set up as its own page on performance advises.
//
//   node graphile.mjs runs URL JOBS        → jobs per second
//   node graphile.mjs latency URL SAMPLES  → milliseconds from the call of addJob, and from its return,
//                                            to the start of the job: p50 p99 p50 p99

import { Logger, makeWorkerUtils, run } from "graphile-worker";
import { setTimeout as sleep } from "node:timers/promises";

const [what, connectionString, count] = process.argv.slice(2);
const logger = new Logger(() => (level, message) => {
  if (level === "error" || level === "warning") console.error(message);
});
const preset = {
  worker: {
    connectionString,
    logger,
    concurrentJobs: 24,
    maxPoolSize: 25,
    localQueue: { size: 500 },
    completeJobBatchDelay: 0,
    failJobBatchDelay: 0,
  },
};
const utils = await makeWorkerUtils({ preset });
await utils.migrate();
await { runs, latency }[what](Number(count));

async function runs(jobs) {
  const add = `SELECT count(*) FROM graphile_worker.add_jobs(ARRAY(
    SELECT json_populate_record(null::graphile_worker.job_spec,
      json_build_object('identifier', 'nothing', 'payload', json_build_object('id', n)))
    FROM generate_series($1::int, $2::int) n))`;
  const batch = 10_000;
  for (let n = 0; n < jobs; n += batch) {
    await query(add, [n + 1, Math.min(n + batch, jobs)]);
  }
  await query("VACUUM ANALYZE");
  await query("CHECKPOINT");

  let ran = 0;
  const began = performance.now();
  const runner = await run({ preset, noHandleSignals: true, taskList: { nothing: () => void ran++ } });
  while (ran < jobs) await sleep(1);
  while (await waits()) await sleep(1);
  const seconds = (performance.now() - began) / 1e3;
  await runner.stop();
  if (ran !== jobs) throw new Error(`${ran} jobs ran, of ${jobs}`);
  console.log(jobs / seconds);
}

async function latency(samples) {
  let started;
  const taskList = { nothing: () => started(performance.now()) };
  const runner = await run({ preset, noHandleSignals: true, taskList });
  const [fromCall, fromReturn] = [[], []];
  // The first few find connections and statements still to be made.
  for (let n = -50; n < samples; n++) {
    await sleep(5 + Math.random() * 10);
    const start = new Promise((resolve) => (started = resolve));
    const called = performance.now();
    await utils.addJob("nothing", { id: n });
    const returned = performance.now();
    const at = await start;
    if (n < 0) continue;
    fromCall.push(at - called);
    fromReturn.push(Math.max(0, at - returned));
  }
  await runner.stop();
  for (const times of [fromCall, fromReturn]) {
    times.sort((a, b) => a - b);
    for (const share of [0.5, 0.99]) console.log(times[Math.round((times.length - 1) * share)]);
  }
}

async function waits() {
  const { rows } = await query("SELECT EXISTS (SELECT FROM graphile_worker._private_jobs) AS waits");
  return rows[0].waits;
}

function query(text, values) {
  return utils.withPgClient((client) => client.query(text, values));
}

await utils.release();
