-- The place in a trace that a job's attempts are below of.
ALTER TABLE vedetta_job ADD COLUMN trace text;
ALTER TABLE vedetta_job_over ADD COLUMN trace text;

-- A database that was made before has them without it.
DROP FUNCTION IF EXISTS vedetta_job_back, vedetta_job_wake, vedetta_job_take, vedetta_job_over, vedetta_job_again,
    vedetta_job_keep;

-- What workers do a thousand times a second is in functions for the sake of their settings: a plan is kept,
-- and one that was made while the table was empty would read all of it when it has a million rows.

-- Has a job that is handed out wait again, or be over if another waits under its key: which goes on.
-- It had no key, or one: of two with the same key one goes on, so they go one after the other.
CREATE FUNCTION vedetta_job_back(its_id bigint, its_run_at timestamptz, counts boolean, its_token bigint, why text)
RETURNS bigint LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    job   vedetta_job;
    other bigint;
BEGIN
    DELETE FROM vedetta_job WHERE id = its_id RETURNING * INTO job;
    job.attempts := job.attempts - CASE WHEN counts THEN 0 ELSE 1 END;
    job.run_at := its_run_at;
    INSERT INTO vedetta_job AS j (
        id, rank, wake_at, run_at, made_at, changed_at, token, queue, cost, attempts, max_attempts, progress,
        state, priority, started_at, timeout, kind, payload, unique_key, tags, worker, message, error, log, trace)
    VALUES (
        job.id, job.run_at - job.priority * interval '1 minute', job.run_at, job.run_at, job.made_at, now(),
        its_token, job.queue, job.cost, job.attempts, job.max_attempts, job.progress,
        CASE WHEN job.run_at > now() THEN 0 ELSE 1 END, job.priority, job.started_at, job.timeout, job.kind,
        job.payload, job.unique_key, job.tags, job.worker, job.message, coalesce(why, job.error), job.log, job.trace)
    ON CONFLICT (queue, unique_key) WHERE unique_key IS NOT NULL AND state <> 2 DO UPDATE SET
        run_at = least(j.run_at, excluded.run_at),
        wake_at = least(j.run_at, excluded.run_at),
        rank = least(j.run_at, excluded.run_at) - j.priority * interval '1 minute',
        state = greatest(j.state, excluded.state),
        changed_at = now()
    RETURNING id INTO other;
    IF other <> its_id THEN
        INSERT INTO vedetta_job_over VALUES (
            job.id, job.run_at, job.made_at, now(), its_token, job.queue, job.cost, job.attempts,
            job.max_attempts, job.progress, 4, job.priority, job.started_at, job.timeout, job.kind,
            job.payload, job.unique_key, job.tags, job.worker, job.message,
            coalesce(why || '; ', '') || 'job ' || other || ' of the same key goes on in its place',
            job.log, NULL, job.trace);
        INSERT INTO vedetta_job_tally VALUES (job.queue, 4, 1);
    END IF;
    RETURN other;
END $$;

-- Has jobs be ready whose time has come, and deals with those whose leases have ended.
CREATE FUNCTION vedetta_job_wake(its_queue integer) RETURNS void LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    lapsed record;
BEGIN
    UPDATE vedetta_job SET state = 1 WHERE ctid = ANY (ARRAY (
        SELECT ctid FROM vedetta_job WHERE queue = its_queue AND state = 0 AND wake_at <= now()
        ORDER BY wake_at LIMIT 2000 FOR UPDATE SKIP LOCKED));
    FOR lapsed IN
        SELECT id, attempts, max_attempts, worker FROM vedetta_job
        WHERE queue = its_queue AND state = 2 AND wake_at <= now()
        ORDER BY wake_at LIMIT 1000 FOR UPDATE SKIP LOCKED
    LOOP
        IF lapsed.attempts < lapsed.max_attempts THEN
            PERFORM vedetta_job_back(
                lapsed.id, now(), true, 0, format('its worker %s went away', lapsed.worker));
        ELSE
            PERFORM vedetta_job_over(
                ARRAY[lapsed.id], NULL, '{3}', '{NULL}',
                ARRAY[format('its worker %s went away in attempt %s of %s',
                             lapsed.worker, lapsed.attempts, lapsed.max_attempts)]);
        END IF;
    END LOOP;
END $$;

-- Hands out jobs, as many as cost less than the room. A row without an id says that there is no more, for so
-- many microseconds.
CREATE FUNCTION vedetta_job_take(
    its_queue integer, room bigint, capacity integer, term bigint, seed bigint, who text)
RETURNS TABLE (
    id bigint, token bigint, kind text, payload text, cost integer, attempts integer, max_attempts integer,
    timeout bigint, tags text, rank timestamptz, rest bigint, trace text, waited bigint)
LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    first_rank timestamptz;
    first_id   bigint;
    fit        bigint;
    worth      bigint;
    taken      bigint;
BEGIN
    -- A claim that is lost with the server is as if it had not been made: it need not reach the disk.
    PERFORM set_config('synchronous_commit', 'off', true);
    IF EXISTS (SELECT FROM vedetta_job_queue WHERE queue = its_queue AND mode = 1) THEN
        RETURN QUERY SELECT NULL::bigint, NULL::bigint, NULL, NULL, NULL::integer, NULL::integer,
            NULL::integer, NULL::bigint, NULL, NULL::timestamptz, NULL::bigint, NULL, NULL::bigint;
        RETURN;
    END IF;
    IF EXISTS (SELECT FROM vedetta_job WHERE queue = its_queue AND state = 0 AND wake_at <= now())
       OR EXISTS (SELECT FROM vedetta_job WHERE queue = its_queue AND state = 2 AND wake_at <= now())
    THEN
        PERFORM vedetta_job_wake(its_queue);
    END IF;
    -- The index may begin with many that are gone: they are passed over once.
    SELECT rank, id INTO first_rank, first_id FROM vedetta_job
    WHERE queue = its_queue AND state = 1 ORDER BY rank, id LIMIT 1;
    IF first_id IS NOT NULL THEN
        -- How many fit is looked up before any is locked: else others would find too many locked.
        SELECT count(*), sum(price) INTO fit, worth FROM (
            SELECT price, sum(price) OVER (ORDER BY rank, id ROWS UNBOUNDED PRECEDING) - price AS before FROM (
                SELECT least(cost, capacity) AS price, rank, id FROM vedetta_job
                WHERE queue = its_queue AND state = 1 AND (rank, id) >= (first_rank, first_id)
                ORDER BY rank, id LIMIT least(room, 10000)
            ) AS first
        ) AS first WHERE before < room;
        RETURN QUERY UPDATE vedetta_job AS j SET
            state = 2,
            token = hashint8extended(j.id, seed),
            lease = term,
            wake_at = now() + term * interval '1 microsecond',
            attempts = j.attempts + 1,
            worker = who,
            started_at = now(),
            changed_at = now(),
            progress = 0,
            message = NULL
        WHERE j.ctid = ANY (ARRAY (
            SELECT row FROM (
                SELECT row, sum(price) OVER (ORDER BY rank, id ROWS UNBOUNDED PRECEDING) - price AS before FROM (
                    SELECT ctid AS row, least(cost, capacity) AS price, rank, id FROM vedetta_job
                    WHERE queue = its_queue AND state = 1 AND (rank, id) >= (first_rank, first_id)
                    ORDER BY rank, id LIMIT fit FOR UPDATE SKIP LOCKED
                ) AS first
            ) AS first WHERE before < room))
        RETURNING j.id, j.token, j.kind, j.payload, j.cost, j.attempts, j.max_attempts, j.timeout, j.tags, j.rank,
            NULL::bigint, j.trace, (extract(epoch FROM now() - j.run_at) * 1000000)::bigint;
        GET DIAGNOSTICS taken = ROW_COUNT;
        IF worth >= room AND taken >= fit THEN
            RETURN;
        END IF;
        IF EXISTS (SELECT FROM vedetta_job
                   WHERE queue = its_queue AND state = 1 AND (rank, id) >= (first_rank, first_id))
        THEN
            IF taken = 0 THEN
                rest := 5000; -- others have them locked
                RETURN NEXT;
            END IF;
            RETURN;
        END IF;
    END IF;
    SELECT (extract(epoch FROM min(at) - clock_timestamp()) * 1000000)::bigint INTO rest FROM (
        (SELECT wake_at AS at FROM vedetta_job
         WHERE queue = its_queue AND state = 0 AND wake_at > now() ORDER BY wake_at LIMIT 1)
        UNION ALL
        (SELECT wake_at AS at FROM vedetta_job
         WHERE queue = its_queue AND state = 2 AND wake_at > now() ORDER BY wake_at LIMIT 1)
    ) AS next;
    RETURN NEXT;
END $$;

-- Has jobs be over that are held with these tokens, or whoever holds them. Which.
--
-- Of the indexes only that of the ids fits what this and the next two look for, and not by chance: the others
-- have conditions on the state, and "state + 0" fulfils none. Nor is there a join to be done in a wrong order.
CREATE FUNCTION vedetta_job_over(
    ids bigint[], tokens bigint[], states smallint[], results text[], errors text[])
RETURNS TABLE (its_id bigint, its_token bigint) LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_nestloop = off SET enable_mergejoin = off
SET jit = off AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY WITH ended AS (
        DELETE FROM vedetta_job
        WHERE id = ANY (ids) AND state + 0 = 2
              AND (tokens IS NULL OR (token IN (SELECT unnest(tokens))) IS TRUE AND wake_at > now())
        RETURNING *
    ), moved AS (
        INSERT INTO vedetta_job_over
        SELECT e.id, run_at, made_at, now(), CASE WHEN tokens IS NULL THEN 0 ELSE e.token END, queue, cost,
               attempts, max_attempts, CASE WHEN u.state = 5 THEN 1 ELSE progress END, u.state, priority,
               started_at, timeout, kind, payload, unique_key, tags, worker, message, u.error, log, u.result, trace
        FROM ended AS e JOIN unnest(ids, tokens, states, results, errors) AS u (id, token, state, result, error)
            ON e.id = u.id AND (tokens IS NULL OR e.token = u.token)
        RETURNING queue, state
    ), counted AS (
        INSERT INTO vedetta_job_tally SELECT queue, state, count(*) FROM moved GROUP BY queue, state
    )
    SELECT id, token FROM ended;
END $$;

-- Has jobs wait again that are held with these tokens: released, with no delay; or later, and with an error
-- if that counts as an attempt. Which, and after how many microseconds they are due; one that another of its
-- key goes on for is never due.
CREATE FUNCTION vedetta_job_again(ids bigint[], tokens bigint[], delays bigint[], errors text[])
RETURNS TABLE (its_id bigint, its_token bigint, its_queue text, due bigint) LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_nestloop = off SET enable_mergejoin = off
SET jit = off AS $$
#variable_conflict use_column
DECLARE
    keyed record;
BEGIN
    RETURN QUERY UPDATE vedetta_job AS j SET
        run_at = coalesce(u.at, j.run_at),
        wake_at = coalesce(u.at, j.run_at),
        rank = coalesce(u.at, j.run_at) - j.priority * interval '1 minute',
        state = CASE WHEN coalesce(u.at, j.run_at) > now() THEN 0 ELSE 1 END,
        attempts = j.attempts - CASE WHEN u.error IS NULL THEN 1 ELSE 0 END,
        error = coalesce(u.error, j.error),
        changed_at = now()
    FROM (SELECT id, token, now() + delay * interval '1 microsecond' AS at, error
          FROM unnest(ids, tokens, delays, errors) AS u (id, token, delay, error)) AS u
    WHERE j.id = ANY (ids) AND j.id = u.id AND j.token = u.token AND j.state + 0 = 2 AND j.wake_at > now()
          AND j.unique_key || '' IS NULL
    RETURNING j.id, j.token, (SELECT name FROM vedetta_job_queue AS q WHERE q.queue = j.queue),
        (extract(epoch FROM greatest(j.run_at - now(), '0')) * 1000000)::bigint;
    FOR keyed IN
        SELECT j.id, j.token, j.queue, coalesce(now() + u.delay * interval '1 microsecond', j.run_at) AS at,
               u.error
        FROM unnest(ids, tokens, delays, errors) AS u (id, token, delay, error) JOIN vedetta_job AS j USING (id)
        WHERE j.id = ANY (ids) AND j.token = u.token AND j.state + 0 = 2 AND j.wake_at > now()
              AND j.unique_key || '' IS NOT NULL
        FOR UPDATE OF j
    LOOP
        its_id := keyed.id;
        its_token := keyed.token;
        its_queue := (SELECT name FROM vedetta_job_queue WHERE queue = keyed.queue);
        due := CASE
            WHEN vedetta_job_back(keyed.id, keyed.at, keyed.error IS NOT NULL, keyed.token, keyed.error) = keyed.id
            THEN (extract(epoch FROM greatest(keyed.at - now(), '0')) * 1000000)::bigint
        END;
        RETURN NEXT;
    END LOOP;
END $$;

-- Prolongs leases, and notes what there is to tell. Which are still held.
CREATE FUNCTION vedetta_job_keep(
    ids bigint[], tokens bigint[], news real[], messages text[], logs text[])
RETURNS TABLE (its_id bigint, its_token bigint) LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_nestloop = off SET enable_mergejoin = off
SET jit = off AS $$
#variable_conflict use_column
BEGIN
    PERFORM set_config('synchronous_commit', 'off', true);
    -- One that somebody has locked is about to be settled or called off, and nobody waits for that: it is
    -- held for as long as it was.
    WITH held AS MATERIALIZED (
        SELECT id FROM vedetta_job
        WHERE id = ANY (ids) AND (token IN (SELECT unnest(tokens))) IS TRUE AND state + 0 = 2
              AND wake_at > now()
        FOR UPDATE SKIP LOCKED
    )
    UPDATE vedetta_job AS j SET
        wake_at = now() + j.lease * interval '1 microsecond',
        progress = coalesce(u.progress, j.progress),
        message = coalesce(u.message, j.message),
        log = coalesce(u.log, j.log),
        changed_at = CASE WHEN u.progress IS NULL AND u.message IS NULL AND u.log IS NULL
                          THEN j.changed_at ELSE now() END
    FROM held JOIN unnest(ids, tokens, news, messages, logs) AS u (id, token, progress, message, log) USING (id)
    WHERE j.id = ANY (ids) AND j.id = held.id AND j.token = u.token;
    RETURN QUERY SELECT id, token FROM vedetta_job
    WHERE id = ANY (ids) AND (token IN (SELECT unnest(tokens))) IS TRUE AND state + 0 = 2
          AND wake_at > now();
END $$;
