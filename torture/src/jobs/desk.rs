//! The driver's own line to the queue: it asks for jobs, calls them off, and looks at what is left.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use async_nats::jetstream;
use async_nats::jetstream::stream::RawMessageErrorKind;
use serde_json::Value;
use testing::Proxy;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;
use vedetta_core::JobState;
use vedetta_db::postgres::Postgres;
use vedetta_jobs::jetstream::{JetStream, Options};
use vedetta_jobs::postgres::PostgresJobs;
use vedetta_jobs::remote::RemoteJobs;
use vedetta_jobs::sqlite::SqliteJobs;
use vedetta_jobs::{
    Change, Enqueued, Filter, JobId, Jobs as _, JobsError, Ledger, Monitor, NewJob,
};

use super::Setup;
use super::child::{Task, open_db, stream_options};
use super::records::Records;
use super::world::Server;

/// A job, as the backend has it in the end.
#[derive(Debug, Clone)]
pub(super) struct Record {
    pub id: u64,
    pub number: u64,
    pub state: JobState,
    pub error: String,
}

/// All that the backend has in the end.
#[derive(Debug, Default)]
pub(super) struct Left {
    /// All jobs; of a stream, as they were recorded.
    pub records: Option<Vec<Record>>,
    /// Of a stream: the numbers of its messages that are still there.
    pub undone: Vec<u64>,
    /// And of its dead letters.
    pub dead: Vec<u64>,
    /// The numbers of effects.
    pub effects: Vec<u64>,
}

pub(super) enum Desk {
    Sqlite { jobs: RemoteJobs, link: SocketAddr },
    Postgres(PostgresJobs),
    Nats { jobs: JetStream, context: jetstream::Context, options: Options, records: Records },
}

/// Longer than the longest cut.
const PATIENCE: Duration = Duration::from_secs(10);

impl Desk {
    pub(super) async fn open(
        server: &Server,
        link: &Proxy,
        setup: &Setup,
        folder: &Path,
    ) -> anyhow::Result<Self> {
        let url = server.url(link);
        Ok(match server {
            Server::Sqlite { .. } => {
                Self::Sqlite { jobs: RemoteJobs::new(&url, None)?, link: link.address() }
            }
            Server::Postgres(_) => {
                let schemas = [vedetta_jobs::postgres::SCHEMA];
                let db = Postgres::open_with(&url, 6, &schemas).await?;
                let client = db.client().await?;
                client.batch_execute("CREATE TABLE effect (number bigint NOT NULL)").await?;
                Self::Postgres(PostgresJobs::new(db))
            }
            Server::Nats(_) => {
                let options = stream_options(setup.lease, setup.slots);
                let client = async_nats::connect(&url).await?;
                let records = Records::open(folder, setup.seed).await?;
                let monitor: Arc<dyn Monitor> = Arc::clone(&records.jobs) as _;
                let jobs = JetStream::open(&url, options.clone(), Some(monitor)).await?;
                Self::Nats { jobs, context: jetstream::new(client), options, records }
            }
        })
    }

    /// Where workers tell what becomes of a stream's jobs.
    pub(super) fn records(&self) -> Option<SocketAddr> {
        match self {
            Self::Nats { records, .. } => Some(records.address),
            _ => None,
        }
    }

    pub(super) async fn enqueue(&self, jobs: &[NewJob]) -> Result<Vec<Enqueued>, JobsError> {
        match self {
            Self::Sqlite { jobs: desk, .. } => desk.enqueue(jobs).await,
            Self::Postgres(desk) => desk.enqueue(jobs).await,
            Self::Nats { jobs: desk, .. } => desk.enqueue(jobs).await,
        }
    }

    pub(super) async fn cancel(&self, id: JobId) -> anyhow::Result<Change> {
        match self {
            Self::Sqlite { link, .. } => {
                let path = format!("/api/v1/jobs/{id}/cancel");
                match http(*link, "POST", &path).await? {
                    (200, _) => Ok(Change::Made),
                    (404, _) => Ok(Change::NoSuch),
                    (409, _) => Ok(Change::Not(JobState::Done)),
                    (status, body) => bail!("{status}: {body}"),
                }
            }
            Self::Postgres(jobs) => Ok(jobs.cancel(id).await?),
            Self::Nats { .. } => bail!("a job of a stream cannot be called off"),
        }
    }

    /// How many jobs wait or run.
    pub(super) async fn left(&self) -> anyhow::Result<u64> {
        timeout(PATIENCE, async {
            match self {
                Self::Sqlite { link, .. } => {
                    let (status, body) = http(*link, "GET", "/api/v1/queues").await?;
                    ensure!(status == 200, "{status}: {body}");
                    let told: Value = serde_json::from_str(&body)?;
                    let queues = told["queues"].as_array().context("queues")?;
                    let counts = ["ready", "scheduled", "running"];
                    let counts = queues.iter().flat_map(|queue| counts.map(|count| &queue[count]));
                    Ok(counts.filter_map(Value::as_u64).sum())
                }
                Self::Postgres(jobs) => {
                    let queues = jobs.queues().await?;
                    Ok(queues.iter().map(|q| q.ready + q.scheduled + q.running).sum())
                }
                Self::Nats { context, options, .. } => {
                    let stream = context.get_stream(&options.stream).await?;
                    let info = stream.consumer_info(&options.durable).await?;
                    Ok(info.num_pending + info.num_ack_pending as u64)
                }
            }
        })
        .await?
    }

    /// All there is in the end. The server of the embedded queue is killed for it, once more.
    pub(super) async fn all(&self, server: &mut Server, folder: &Path) -> anyhow::Result<Left> {
        match self {
            Self::Sqlite { .. } => {
                server.kill();
                let db = open_db(folder)?;
                let records = records(&SqliteJobs::open(db.clone()).await?).await?;
                tokio::task::spawn_blocking(move || db.close_blocking()).await?;
                Ok(Left { records: Some(records), ..Left::default() })
            }
            Self::Postgres(jobs) => {
                let client = jobs.db().client().await?;
                let rows = client.query("SELECT number FROM effect", &[]).await?;
                let effects = rows.iter().map(|row| row.get::<_, i64>(0).unsigned_abs()).collect();
                Ok(Left { records: Some(records(jobs).await?), effects, ..Left::default() })
            }
            Self::Nats { context, options, records: told, .. } => {
                let undone = numbers(context, &options.stream).await?;
                let dead = numbers(context, &options.dead_stream).await?;
                let records = Some(records(&*told.jobs).await?);
                Ok(Left { records, undone, dead, ..Left::default() })
            }
        }
    }
}

/// The numbers of all messages of a stream.
async fn numbers(context: &jetstream::Context, stream: &str) -> anyhow::Result<Vec<u64>> {
    let mut stream = context.get_stream(stream).await?;
    let state = stream.info().await?.state.clone();
    let mut numbers = Vec::new();
    for sequence in state.first_sequence..=state.last_sequence {
        match stream.get_raw_message(sequence).await {
            Ok(letter) => numbers.push(serde_json::from_slice::<Task>(&letter.payload)?.number),
            Err(error) if error.kind() == RawMessageErrorKind::NoMessageFound => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(numbers)
}

async fn records(ledger: &impl Ledger) -> anyhow::Result<Vec<Record>> {
    let (mut all, mut before) = (Vec::new(), None);
    loop {
        let page = ledger.list(&Filter::default(), before, 1000).await?;
        for job in page.jobs {
            let task: Task = serde_json::from_str(job.payload.get())?;
            let error = job.error.unwrap_or_default();
            // One that is kept in a stream has its number there.
            // A server that was killed may have given it to another job since: then it is nobody's.
            let nobodys = u64::MAX - job.id.0;
            let there =
                job.connection.rsplit_once('/').map(|(_, id)| id.parse().unwrap_or(nobodys));
            let id = there.unwrap_or(job.id.0);
            all.push(Record { id, number: task.number, state: job.status, error });
        }
        before = page.next;
        if before.is_none() {
            return Ok(all);
        }
    }
}

/// The status and the body of an answer.
async fn http(to: SocketAddr, method: &str, path: &str) -> anyhow::Result<(u16, String)> {
    let asked = async {
        let mut stream = TcpStream::connect(to).await?;
        let head = "Host: localhost\r\nContent-Type: application/json\r\nContent-Length: 0\r\n";
        let request = format!("{method} {path} HTTP/1.1\r\n{head}Connection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await?;
        let (head, body) = answer.split_once("\r\n\r\n").context("no answer")?;
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
        Ok((status.context("no status")?, body.to_owned()))
    };
    timeout(PATIENCE, asked).await?
}
