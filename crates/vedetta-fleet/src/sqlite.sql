-- Times are milliseconds since 1970.
CREATE TABLE fleet_command (
    seq        INTEGER PRIMARY KEY AUTOINCREMENT,
    id         TEXT NOT NULL UNIQUE,
    -- Whom it is for: worker:ID or supervisor:NAME.
    target     TEXT NOT NULL,
    -- What to do: its first word, and all of it.
    word       TEXT NOT NULL,
    value      TEXT NOT NULL,
    -- 0 requested, 1 taken, 2 applied, 3 replaced by another.
    state      INTEGER NOT NULL DEFAULT 0,
    expires_at INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    taken_at   INTEGER,
    applied_at INTEGER
) STRICT;
CREATE INDEX fleet_command_waiting ON fleet_command (target, seq) WHERE state = 0;
CREATE INDEX fleet_command_old ON fleet_command (expires_at);

CREATE TABLE fleet_worker (
    id             TEXT PRIMARY KEY,
    supervisor     TEXT,
    -- With commas between them.
    queues         TEXT NOT NULL,
    pid            INTEGER NOT NULL,
    host           TEXT NOT NULL,
    version        TEXT NOT NULL,
    -- running, paused, stopping or stopped.
    status         TEXT NOT NULL,
    inside         INTEGER NOT NULL DEFAULT 0,
    birth          TEXT,
    capacity       INTEGER NOT NULL DEFAULT 0,
    note           TEXT,
    started_at     INTEGER NOT NULL,
    last_heartbeat INTEGER NOT NULL,
    created_at     INTEGER NOT NULL,
    updated_at     INTEGER NOT NULL
) STRICT;
CREATE INDEX fleet_worker_supervisor ON fleet_worker (supervisor, status);
CREATE INDEX fleet_worker_seen ON fleet_worker (status, last_heartbeat);

CREATE TABLE fleet_supervisor (
    name           TEXT PRIMARY KEY,
    host           TEXT NOT NULL,
    last_heartbeat INTEGER NOT NULL
) STRICT;
