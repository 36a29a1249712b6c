//! Worker processes, the supervisor that keeps them, and the bus that brings them commands.
//!
//! ```text
//!  people ──► Fleet ──put──► Bus ──take──► Fleet ──beat──► Crew: a worker process
//!               │             ▲ SQLite, PostgreSQL, Redis      │ pause, resume, stop
//!               └── Roster ◄──┴──────── beats ◄────────────────┘
//!                     ▲ SQLite, PostgreSQL
//!  Supervisor ──beat──┘──► starts processes, stops them, adopts those that are there
//! ```
//!
//! Whatever a worker or a supervisor says and hears goes through [`Control`]: in one process a call, between
//! processes plain HTTP. So nothing here needs Unix signals, and a worker can be written in any language.
//!
//! How jobs are done is [`vedetta_jobs::Worker`]'s business.

pub mod bus;
mod control;
mod crew;
mod desk;
mod host;
mod obeyed;
pub mod roster;
pub mod supervisor;
pub mod wire;

pub use bus::{Bus, BusError, CommandId, Order, Target};
pub use control::{Control, ControlError, RemoteFleet};
pub use crew::{Crew, Ending};
pub use desk::{Fleet, FleetError, Wakes};
pub use host::host_name;
pub use roster::Roster;
pub use supervisor::{Balance, Hire, Settings, Supervising, Supervisor};

/// The tables of the fleet.
pub mod sqlite {
    use vedetta_db::Schema;

    pub use crate::bus::sqlite::SqliteBus;
    pub use crate::roster::sqlite::SqliteRoster;

    /// The tables of commands and of the roster, for [`vedetta_db::Db::open`].
    pub const SCHEMA: Schema = Schema {
        component: "fleet",
        steps: &[
            include_str!("sqlite.sql"),
            // It was told to end its workers and to start none.
            "ALTER TABLE fleet_supervisor ADD COLUMN halted INTEGER NOT NULL DEFAULT 0;",
        ],
    };
}

/// The same on PostgreSQL.
pub mod postgres {
    use vedetta_db::Schema;

    pub use crate::bus::postgres::PostgresBus;
    pub use crate::roster::postgres::PostgresRoster;

    /// The tables of commands and of the roster, for [`vedetta_db::postgres::Postgres::open`].
    pub const SCHEMA: Schema = Schema {
        component: "fleet",
        steps: &[
            include_str!("postgres.sql"),
            // It was told to end its workers and to start none.
            "ALTER TABLE vedetta_supervisor ADD COLUMN halted boolean NOT NULL DEFAULT false;",
        ],
    };
}
