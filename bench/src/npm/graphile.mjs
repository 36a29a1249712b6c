// graphile-worker, set up as its own pages on performance advise: a local queue, completion in batches, and no
// line in the log for each success (https://worker.graphile.org/docs/performance, and its own perfTest).

process.env.NO_LOG_SUCCESS = "1";
const { Logger, makeWorkerUtils, run } = await import("graphile-worker");

const logger = new Logger(() => (level, message) => {
  if (level === "error" || level === "warning") console.error(message);
});

export async function open(connectionString) {
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
  const query = (text, values) => utils.withPgClient((client) => client.query(text, values));
  return {
    query,
    add: (id) => utils.addJob("nothing", { id }),
    addMany: (ids, runAt) =>
      utils.addJobs(ids.map((id) => ({ identifier: "nothing", payload: { id }, runAt }))),
    start: (job) => run({ preset, noHandleSignals: true, taskList: { nothing: job } }),
    // It deletes a job that is done. Those that are due were added first.
    isAnyLeft: async (jobs) => {
      const left = "SELECT EXISTS (SELECT FROM graphile_worker._private_jobs WHERE id <= $1) AS some";
      return (await query(left, [jobs])).rows[0].some;
    },
  };
}
