CREATE TABLE vedetta_command (
    seq        bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    id         text NOT NULL UNIQUE,
    -- Whom it is for: worker:ID or supervisor:NAME.
    target     text NOT NULL,
    -- What to do: its first word, and all of it.
    word       text NOT NULL,
    value      text NOT NULL,
    -- 0 requested, 1 taken, 2 applied, 3 replaced by another.
    state      smallint NOT NULL DEFAULT 0,
    expires_at timestamptz NOT NULL,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    taken_at   timestamptz,
    applied_at timestamptz
);
CREATE INDEX vedetta_command_waiting ON vedetta_command (target, seq) WHERE state = 0;
CREATE INDEX vedetta_command_old ON vedetta_command (expires_at);

-- Has a command wait, in the place of those it replaces. No row if too many wait.
CREATE FUNCTION vedetta_command_put(
    p_id text, p_target text, p_word text, p_value text, p_ttl float8, p_kept float8,
    p_replaces text[], p_yields_to text[], p_most bigint
) RETURNS TABLE (r_state smallint, r_created timestamptz, r_expires timestamptz)
LANGUAGE plpgsql AS $$
DECLARE
    at timestamptz;
    becomes smallint := 0;
BEGIN
    PERFORM pg_advisory_xact_lock(hashtextextended(p_target, 0));
    at := clock_timestamp();
    DELETE FROM vedetta_command WHERE expires_at < at - make_interval(secs => p_kept);
    IF EXISTS (SELECT FROM vedetta_command WHERE target = p_target AND state = 0
               AND expires_at > at AND word = ANY (p_yields_to)) THEN
        becomes := 3;
    ELSIF (SELECT count(*) FROM vedetta_command WHERE target = p_target AND state = 0
           AND expires_at > at AND word <> ALL (p_replaces)) >= p_most THEN
        RETURN;
    ELSE
        UPDATE vedetta_command SET state = 3
        WHERE target = p_target AND state = 0 AND word = ANY (p_replaces);
        PERFORM pg_notify('vedetta_command', p_target);
    END IF;
    INSERT INTO vedetta_command (id, target, word, value, state, expires_at, created_at)
    VALUES (p_id, p_target, p_word, p_value, becomes, at + make_interval(secs => p_ttl), at);
    RETURN QUERY SELECT becomes, at, at + make_interval(secs => p_ttl);
END $$;

CREATE TABLE vedetta_worker (
    id             text PRIMARY KEY,
    supervisor     text,
    -- With commas between them.
    queues         text NOT NULL,
    pid            bigint NOT NULL,
    host           text NOT NULL,
    version        text NOT NULL,
    -- running, paused, stopping or stopped.
    status         text NOT NULL,
    inside         boolean NOT NULL DEFAULT false,
    birth          text,
    capacity       bigint NOT NULL DEFAULT 0,
    note           text,
    started_at     bigint NOT NULL,
    last_heartbeat timestamptz NOT NULL,
    created_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    updated_at     timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE INDEX vedetta_worker_supervisor ON vedetta_worker (supervisor, status);
CREATE INDEX vedetta_worker_seen ON vedetta_worker (status, last_heartbeat);

CREATE TABLE vedetta_supervisor (
    name           text PRIMARY KEY,
    host           text NOT NULL,
    last_heartbeat timestamptz NOT NULL
);
