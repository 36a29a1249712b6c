// pg-boss, set up as its own pages advise: batches, fetched without a pause while they are full, and LISTEN
// for a quick start (docs/api/workers.md: batchSize, burstWhenBatchFull, "Low-latency dispatch"), and a table
// of its own for a queue that grows (docs/introduction.md: partition). It keeps what is done.

import { PgBoss } from "pg-boss";

const name = "nothing";

export async function open(connectionString, what) {
  // It costs those who add jobs, and is of use to those who wait for one only.
  const notify = what === "latency";
  const boss = new PgBoss({ connectionString, max: 25, useListenNotify: notify });
  boss.on("error", console.error);
  await boss.start();
  await boss.createQueue(name, { notify, partition: true });
  const query = (text, values) => boss.getDb().executeSql(text, values);
  return {
    query,
    add: (id) => boss.send(name, { id }),
    addMany: (ids, startAfter) => boss.insert(name, ids.map((id) => ({ data: { id }, startAfter }))),
    start: (job) => {
      const options = { batchSize: 500, burstWhenBatchFull: true, localConcurrency: 4 };
      return boss.work(name, options, async (jobs) => jobs.forEach(job));
    },
    isAnyLeft: async () => {
      const left = `SELECT EXISTS (SELECT FROM pgboss.job WHERE name = $1 AND state = 'active') AS some`;
      return (await query(left, [name])).rows[0].some;
    },
  };
}
