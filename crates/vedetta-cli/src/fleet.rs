//! Opening what keeps the fleet.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context as _;
use vedetta::db::Db;
use vedetta::db::postgres::Postgres;
use vedetta::fleet::bus::redis::RedisBus;
use vedetta::fleet::postgres::{PostgresBus, PostgresRoster, SCHEMA};
use vedetta::fleet::sqlite::{SqliteBus, SqliteRoster};
use vedetta::fleet::{Bus, Control, Fleet, Roster, Supervising, Supervisor};
use vedetta::jobs::Ledger;
use vedetta::jobs::remote::RemoteJobs;

use crate::client;
use crate::config::{BusAt, Config, Own};

/// What keeps the jobs, and so the roster.
pub(crate) enum Keeper {
    Sqlite(Db),
    Postgres(Postgres),
}

/// The fleet, with its commands where the config says.
pub(crate) async fn open_fleet(
    config: &Config,
    keeper: Keeper,
    ledger: &Arc<dyn Ledger>,
) -> anyhow::Result<Fleet> {
    let bus: Arc<dyn Bus> = match (config.bus.at()?, &keeper) {
        (BusAt::Redis(url), _) => {
            Arc::new(RedisBus::open(&url).await.context("bus.url cannot be used")?)
        }
        (BusAt::Postgres(url), _) => {
            let db = Postgres::open(&url, &[SCHEMA]).await.context("bus.url cannot be used")?;
            Arc::new(PostgresBus::new(db))
        }
        (BusAt::Same, Keeper::Postgres(db)) => Arc::new(PostgresBus::new(db.clone())),
        (BusAt::Same, Keeper::Sqlite(db)) => Arc::new(SqliteBus::new(db.clone())),
    };
    let roster: Arc<dyn Roster> = match keeper {
        Keeper::Sqlite(db) => Arc::new(SqliteRoster::new(db)),
        Keeper::Postgres(db) => Arc::new(PostgresRoster::new(db)),
    };
    let (ledger, queues) = (Arc::clone(ledger), config.workable());
    Ok(Fleet::open(bus, roster, ledger, queues, config.bus.poll()).await?)
}

/// Starts the declared supervisors, for workers of this server.
pub(crate) fn start_supervisors<C: Control>(
    config: &Config,
    own: &Own,
    file: Option<&Path>,
    control: &Arc<C>,
) -> anyhow::Result<Vec<Supervising>> {
    let declared = config.supervisors(&program()?, own, file);
    let start = |(name, settings, hire): (&str, _, _)| {
        Supervisor::new(name, settings, hire, Arc::clone(control) as _).start()
    };
    Ok(declared.into_iter().map(start).collect())
}

/// This program, for workers; the new one, if it was replaced since it was started.
fn program() -> anyhow::Result<PathBuf> {
    let path = std::env::current_exe().context("cannot tell where this program is")?;
    let text = path.to_string_lossy();
    Ok(text.strip_suffix(" (deleted)").map_or(path.clone(), PathBuf::from))
}

/// The server at an address, with the token and the authority that the environment says.
pub(crate) fn remote(server: &str) -> anyhow::Result<RemoteJobs> {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
    let token = set("VEDETTA_TOKEN").map(|token| token.to_string_lossy().into_owned());
    Ok(match set(client::CA) {
        Some(file) => RemoteJobs::trusting(server, token.as_deref(), Path::new(&file))?,
        None => RemoteJobs::new(server, token.as_deref())?,
    })
}
