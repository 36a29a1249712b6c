//! The records of a stream's jobs. Workers are processes of their own and a file has one, so they tell the
//! driver, which has it; and is not always able to listen, or to answer.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Mutex;
use tokio_util::task::AbortOnDropHandle;
use vedetta_jobs::sqlite::SqliteJobs;
use vedetta_jobs::{Ended, Job, JobId, JobsError, Monitor};

use super::child::open_db;

/// Of so many requests one fails, before or after it was done.
const ONE_OF: u32 = 50;

#[derive(Debug, Serialize, Deserialize)]
enum Asked {
    Tell(Vec<Job>),
    /// Times are milliseconds since 1970.
    Ended(String, Vec<(JobId, u64)>),
}

/// An error is one that may be over when it is asked again.
type Answer<T> = Result<T, String>;

/// The driver's side.
pub(super) struct Records {
    pub jobs: Arc<SqliteJobs>,
    pub address: SocketAddr,
    _serving: AbortOnDropHandle<()>,
}

impl Records {
    pub(super) async fn open(folder: &Path, seed: u64) -> anyhow::Result<Self> {
        let folder = folder.to_owned();
        let db = tokio::task::spawn_blocking(move || open_db(&folder)).await??;
        let jobs = Arc::new(SqliteJobs::open(db).await?);
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let address = listener.local_addr()?;
        let serving = tokio::spawn(serve(listener, Arc::clone(&jobs), seed));
        Ok(Self { jobs, address, _serving: AbortOnDropHandle::new(serving) })
    }
}

async fn serve(listener: TcpListener, jobs: Arc<SqliteJobs>, seed: u64) {
    let mut rng = fastrand::Rng::with_seed(seed ^ 0x04ec_04d5);
    // They end with this one.
    let mut clients = tokio::task::JoinSet::new();
    while let Ok((client, _)) = listener.accept().await {
        let (jobs, rng) = (Arc::clone(&jobs), rng.fork());
        clients.spawn(async move {
            // One that was killed does not say goodbye.
            let _ = answer(client, &jobs, rng).await;
        });
    }
}

async fn answer(
    client: TcpStream,
    jobs: &SqliteJobs,
    mut rng: fastrand::Rng,
) -> anyhow::Result<()> {
    let mut client = BufReader::new(client);
    let mut line = Vec::new();
    while client.read_until(b'\n', &mut line).await? > 0 {
        let asked: Asked = serde_json::from_slice(&line)?;
        let (fails, is_done) = (rng.u32(..ONE_OF) == 0, rng.bool());
        let answer: Answer<Value> = if fails && !is_done {
            Err("not now".into())
        } else {
            let done = match asked {
                Asked::Tell(told) => jobs.tell(&told).await.map(serde_json::to_value),
                Asked::Ended(connection, asked) => {
                    let at = |ms| SystemTime::UNIX_EPOCH + Duration::from_millis(ms);
                    let asked: Vec<_> = asked.into_iter().map(|(id, ms)| (id, at(ms))).collect();
                    jobs.ended(&connection, &asked).await.map(serde_json::to_value)
                }
            };
            match done {
                _ if fails => Err("it was done".into()),
                Ok(said) => Ok(said?),
                Err(error) => Err(error.to_string()),
            }
        };
        let mut said = serde_json::to_vec(&answer)?;
        said.push(b'\n');
        client.write_all(&said).await?;
        line.clear();
    }
    Ok(())
}

/// The workers' side.
pub(super) struct Line {
    address: SocketAddr,
    connection: Mutex<Option<BufReader<TcpStream>>>,
}

impl Line {
    pub(super) fn to(address: SocketAddr) -> Self {
        Self { address, connection: Mutex::default() }
    }

    async fn ask<T: DeserializeOwned>(&self, asked: &Asked) -> Result<T, JobsError> {
        let lost = |error: anyhow::Error| JobsError::Unavailable(error.into());
        let mut connection = self.connection.lock().await;
        let mut line = match connection.take() {
            Some(line) => line,
            None => {
                let connected = TcpStream::connect(self.address).await;
                BufReader::new(connected.map_err(|error| lost(error.into()))?)
            }
        };
        let answer: Answer<T> = exchange(&mut line, asked).await.map_err(lost)?;
        // Only one that has answered has nothing more to say.
        *connection = Some(line);
        answer.map_err(|why| JobsError::Unavailable(why.into()))
    }
}

async fn exchange<T: DeserializeOwned>(
    line: &mut BufReader<TcpStream>,
    asked: &Asked,
) -> anyhow::Result<Answer<T>> {
    let mut said = serde_json::to_vec(asked)?;
    said.push(b'\n');
    line.write_all(&said).await?;
    let mut answer = Vec::new();
    line.read_until(b'\n', &mut answer).await?;
    Ok(serde_json::from_slice(&answer)?)
}

#[async_trait]
impl Monitor for Line {
    async fn tell(&self, jobs: &[Job]) -> Result<Vec<bool>, JobsError> {
        self.ask(&Asked::Tell(jobs.to_owned())).await
    }

    async fn ended(
        &self,
        connection: &str,
        jobs: &[(JobId, SystemTime)],
    ) -> Result<Vec<Option<Ended>>, JobsError> {
        let millis = |at: &SystemTime| {
            let since = at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
            u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
        };
        let jobs = jobs.iter().map(|(id, at)| (*id, millis(at))).collect();
        self.ask(&Asked::Ended(connection.to_owned(), jobs)).await
    }
}
