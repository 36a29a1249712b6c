//! Jobs on PostgreSQL.

#[macro_use]
mod suite;

use std::sync::{Arc, Weak};

use testing::postgres::Server;
use tokio::sync::Mutex;
use vedetta_db::postgres::Postgres;
use vedetta_jobs::postgres::{PostgresJobs, SCHEMA};

use suite::World;

jobs_suite!(crate::Pg);

struct Pg {
    server: Arc<Server>,
    url: String,
    jobs: Arc<PostgresJobs>,
}

/// One server for all tests that run at the same time.
static SERVER: Mutex<Weak<Server>> = Mutex::const_new(Weak::new());

impl Pg {
    async fn open(server: Arc<Server>, url: String) -> Self {
        let db = Postgres::open_with(&url, 6, &[SCHEMA]).await.unwrap();
        Self { server, url, jobs: Arc::new(PostgresJobs::new(db)) }
    }
}

impl World for Pg {
    type Jobs = PostgresJobs;

    async fn new() -> Self {
        let mut shared = SERVER.lock().await;
        let server = match shared.upgrade() {
            Some(server) => server,
            None => {
                let server = Arc::new(Server::start().await);
                *shared = Arc::downgrade(&server);
                server
            }
        };
        drop(shared);
        let url = server.database().await;
        Self::open(server, url).await
    }

    async fn neighbour(&self) -> Self {
        Self::open(Arc::clone(&self.server), self.url.clone()).await
    }

    async fn reopened(self) -> Self {
        let Self { server, url, jobs } = self;
        drop(jobs);
        Self::open(server, url).await
    }

    fn jobs(&self) -> &Arc<PostgresJobs> {
        &self.jobs
    }
}
