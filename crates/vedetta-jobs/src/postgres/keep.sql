-- A log with more of it, its last 16 KiB, of whole characters, and of whole lines where there are any.
CREATE FUNCTION vedetta_job_tail(log text, more text) RETURNS text LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    whole text := coalesce(log, '') || more;
    bytes bytea;
    cut   text;
BEGIN
    IF octet_length(whole) <= 16384 THEN
        RETURN whole;
    END IF;
    bytes := convert_to(whole, 'UTF8');
    bytes := substr(bytes, greatest(length(bytes) - 16384, 0) + 1);
    -- It may begin within a character.
    WHILE length(bytes) > 0 AND get_byte(bytes, 0) & 192 = 128 LOOP
        bytes := substr(bytes, 2);
    END LOOP;
    cut := convert_from(bytes, 'UTF8');
    RETURN CASE WHEN strpos(cut, E'\n') > 0 THEN substr(cut, strpos(cut, E'\n') + 1) ELSE cut END;
END $$;

-- Prolongs leases, and notes what there is to tell: logs are appended to, while the row is locked, so that of
-- two who tell at once neither's lines are lost. Which are still held, and of which it was noted.
DROP FUNCTION vedetta_job_keep;
CREATE FUNCTION vedetta_job_keep(
    ids bigint[], tokens bigint[], news real[], messages text[], logs text[])
RETURNS TABLE (its_id bigint, its_token bigint, is_noted boolean) LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_nestloop = off SET enable_mergejoin = off
SET jit = off AS $$
#variable_conflict use_column
DECLARE
    noted bigint[];
BEGIN
    PERFORM set_config('synchronous_commit', 'off', true);
    -- One that somebody has locked is about to be settled or called off, or somebody else tells of it. Nobody
    -- waits for that here, as others would wait, too: it is held for as long as it was.
    WITH held AS MATERIALIZED (
        SELECT id FROM vedetta_job
        WHERE id = ANY (ids) AND (token IN (SELECT unnest(tokens))) IS TRUE AND state + 0 = 2
              AND wake_at > now()
        FOR UPDATE SKIP LOCKED
    ), told AS (
        UPDATE vedetta_job AS j SET
            wake_at = now() + j.lease * interval '1 microsecond',
            progress = coalesce(u.progress, j.progress),
            message = coalesce(u.message, j.message),
            log = CASE WHEN u.log IS NULL THEN j.log ELSE vedetta_job_tail(j.log, u.log) END,
            changed_at = CASE WHEN u.progress IS NULL AND u.message IS NULL AND u.log IS NULL
                              THEN j.changed_at ELSE now() END
        FROM held JOIN unnest(ids, tokens, news, messages, logs) AS u (id, token, progress, message, log) USING (id)
        WHERE j.id = ANY (ids) AND j.id = held.id AND j.token = u.token
        RETURNING j.id
    )
    SELECT coalesce(array_agg(id), '{}') INTO noted FROM told;
    RETURN QUERY SELECT id, token, id = ANY (noted) FROM vedetta_job
    WHERE id = ANY (ids) AND (token IN (SELECT unnest(tokens))) IS TRUE AND state + 0 = 2
          AND wake_at > now();
END $$;
