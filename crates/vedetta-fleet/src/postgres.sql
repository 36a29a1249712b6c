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
