//! Jobs of a server, over real sockets.

#[macro_use]
mod suite;

use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use tempfile::TempDir;
use testing::{PATIENCE, soon};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use vedetta_core::JobState;
use vedetta_core::queue::{Kept, Settled, Woken};
use vedetta_dashboard::{Api, serve};
use vedetta_db::Db;
use vedetta_jobs::remote::RemoteJobs;
use vedetta_jobs::sqlite::{SCHEMA, SqliteJobs};
use vedetta_jobs::{
    Change, Claim, DEFAULT_QUEUE, Ear, Enqueued, Fate, Filter, Job, JobId, Jobs, JobsError, Ledger,
    Mode, NewJob, Note, Page, QueueCounts, Taken, Wanted, Worker,
};
use vedetta_kv::Store;

/// A server, and what it serves.
struct Server {
    jobs: SqliteJobs,
    store: Store,
    address: SocketAddr,
    stop: CancellationToken,
    serving: JoinHandle<()>,
}

impl Server {
    async fn start(folder: &TempDir, port: u16) -> Self {
        Self::start_as(folder, port, |api| api).await
    }

    async fn start_as(folder: &TempDir, port: u16, with: impl FnOnce(Api) -> Api) -> Self {
        let mut options = vedetta_db::Options::new(folder.path().join("vedetta.db"));
        options.ballast = 0;
        let db = Db::open(&options, &[vedetta_kv::SCHEMA, SCHEMA]).unwrap();
        let store = Store::open(db.clone(), vedetta_kv::Options::default()).await.unwrap();
        let jobs = SqliteJobs::open(db).await.unwrap();
        let listener = TcpListener::bind(("127.0.0.1", port)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let stop = CancellationToken::new();
        let api = with(Api::new(store.clone()).jobs(Arc::new(jobs.clone())));
        let serving = tokio::spawn(serve(listener, api, stop.clone()));
        Self { jobs, store, address, stop, serving }
    }

    fn client(&self) -> Arc<RemoteJobs> {
        Arc::new(RemoteJobs::new(&format!("http://{}", self.address), None).unwrap())
    }

    async fn end(self) {
        self.stop.cancel();
        soon("the server ends", self.serving).await.unwrap();
        self.store.close().await;
    }
}

struct World {
    folder: Arc<TempDir>,
    server: Arc<Server>,
    jobs: Arc<Both>,
}

/// Workers are elsewhere, and people at the server.
struct Both {
    workers: Arc<RemoteJobs>,
    people: SqliteJobs,
}

impl Both {
    fn new(server: &Server) -> Arc<Self> {
        Arc::new(Self { workers: server.client(), people: server.jobs.clone() })
    }
}

#[async_trait]
impl Jobs for Both {
    async fn enqueue(&self, jobs: &[NewJob]) -> Result<Vec<Enqueued>, JobsError> {
        self.workers.enqueue(jobs).await
    }

    async fn take(&self, wanted: &Wanted<'_>) -> Result<Taken, JobsError> {
        self.workers.take(wanted).await
    }

    async fn keep(&self, held: &[(Claim, Note)]) -> Result<Vec<Kept>, JobsError> {
        self.workers.keep(held).await
    }

    async fn settle(&self, ended: &[(Claim, Fate)]) -> Result<Vec<Settled>, JobsError> {
        self.workers.settle(ended).await
    }

    async fn woken(&self, queue: &str, ear: &Ear) -> Woken {
        self.workers.woken(queue, ear).await
    }
}

#[async_trait]
impl Ledger for Both {
    async fn job(&self, id: JobId) -> Result<Option<Job>, JobsError> {
        self.people.job(id).await
    }

    async fn list(
        &self,
        filter: &Filter,
        before: Option<JobId>,
        limit: u32,
    ) -> Result<Page, JobsError> {
        self.people.list(filter, before, limit).await
    }

    async fn retry(&self, id: JobId) -> Result<Change, JobsError> {
        self.people.retry(id).await
    }

    async fn cancel(&self, id: JobId) -> Result<Change, JobsError> {
        self.people.cancel(id).await
    }

    async fn delete(&self, id: JobId) -> Result<Change, JobsError> {
        self.people.delete(id).await
    }

    async fn queues(&self) -> Result<Vec<QueueCounts>, JobsError> {
        self.people.queues().await
    }

    async fn set_mode(&self, queue: &str, mode: Mode) -> Result<(), JobsError> {
        self.people.set_mode(queue, mode).await
    }

    async fn prune(&self, done: Duration, dead: Duration) -> Result<u64, JobsError> {
        self.people.prune(done, dead).await
    }

    async fn tick(
        &self,
        name: &str,
        at: SystemTime,
        job: &NewJob,
    ) -> Result<Option<Enqueued>, JobsError> {
        self.people.tick(name, at, job).await
    }

    async fn last_tick(&self, name: &str) -> Result<Option<SystemTime>, JobsError> {
        self.people.last_tick(name).await
    }
}

impl World {
    async fn on(folder: Arc<TempDir>) -> Self {
        let server = Arc::new(Server::start(&folder, 0).await);
        let jobs = Both::new(&server);
        Self { folder, server, jobs }
    }
}

impl suite::World for World {
    type Jobs = Both;

    async fn new() -> Self {
        Self::on(Arc::new(tempfile::tempdir().unwrap())).await
    }

    async fn neighbour(&self) -> Self {
        let (folder, server) = (Arc::clone(&self.folder), Arc::clone(&self.server));
        Self { folder, jobs: Both::new(&server), server }
    }

    async fn reopened(self) -> Self {
        let Ok(server) = Arc::try_unwrap(self.server) else { panic!("nobody else is there") };
        server.end().await;
        Self::on(self.folder).await
    }

    fn jobs(&self) -> &Arc<Both> {
        &self.jobs
    }
}

jobs_suite!(crate::World);
ledger_suite!(crate::World);

fn wanted() -> Wanted<'static> {
    let (queue, worker, lease) = (DEFAULT_QUEUE, "anna", Duration::from_secs(60));
    Wanted { queue, worker, room: 1, capacity: 1, lease }
}

/// A worker that says what it is given, and then waits for ever if the payload says so.
fn start(server: &Server) -> (vedetta_jobs::Working, mpsc::Receiver<String>) {
    let (told, heard) = mpsc::channel(1000);
    let worker = Worker::new(DEFAULT_QUEUE).capacity(NonZeroU32::new(4).unwrap());
    let worker =
        worker.lease(Duration::from_secs(60)).handler("pack", move |_, payload: String| {
            let told = told.clone();
            async move {
                told.send(payload.clone()).await?;
                if payload == "long" {
                    /// Says when it is dropped.
                    struct Ends(mpsc::Sender<String>);
                    impl Drop for Ends {
                        fn drop(&mut self) {
                            let _ = self.0.try_send("ended".into());
                        }
                    }
                    let _ends = Ends(told);
                    std::future::pending::<()>().await;
                }
                Ok::<_, mpsc::error::SendError<String>>(())
            }
        });
    (worker.start(server.client()).unwrap(), heard)
}

fn job(payload: &str) -> NewJob {
    NewJob::new("pack").payload(&payload).unwrap()
}

#[tokio::test]
async fn a_worker_elsewhere_hears_of_a_cancelled_job_long_before_it_would_prolong_its_lease() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start(&folder, 0).await;
    let (working, mut heard) = start(&server);
    let id = server.jobs.enqueue(&[job("long")]).await.unwrap()[0].id;
    assert_eq!(soon("it runs", heard.recv()).await.as_deref(), Some("long"));
    assert_eq!(server.jobs.cancel(id).await.unwrap(), Change::Made);
    let ended = tokio::time::timeout(Duration::from_secs(15), heard.recv()).await;
    assert_eq!(ended.expect("a third of the lease is 20 s").as_deref(), Some("ended"));
    soon("it stops", working.stop(PATIENCE)).await;
    server.end().await;
}

#[tokio::test]
async fn a_worker_elsewhere_survives_a_restart_of_the_server_and_nothing_is_lost() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start(&folder, 0).await;
    let port = server.address.port();
    let (working, mut heard) = start(&server);
    server.jobs.enqueue(&[job("before")]).await.unwrap();
    assert_eq!(soon("it is done", heard.recv()).await.as_deref(), Some("before"));
    server.end().await;
    let server = Server::start(&folder, port).await;
    let id = server.jobs.enqueue(&[job("after")]).await.unwrap()[0].id;
    soon("it is done, too", async {
        // What was not settled before the end is done again.
        while heard.recv().await.as_deref() != Some("after") {}
        while server.jobs.job(id).await.unwrap().unwrap().status != JobState::Done {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
    soon("it stops", working.stop(PATIENCE)).await;
    server.end().await;
}

#[tokio::test]
async fn an_idle_worker_stops_without_waiting_and_leaves_nothing_behind() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start(&folder, 0).await;
    let (working, mut heard) = start(&server);
    server.jobs.enqueue(&[job("once")]).await.unwrap();
    assert_eq!(soon("it works", heard.recv()).await.as_deref(), Some("once"));
    soon("it stops", working.stop(PATIENCE)).await;
    server.jobs.enqueue(&[job("again")]).await.unwrap();
    assert_eq!(server.jobs.take(&wanted()).await.unwrap().jobs.len(), 1, "nobody else has it");
    server.end().await;
}

#[tokio::test]
async fn what_is_wrong_is_told_by_what_to_do_next() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start(&folder, 0).await;
    let client = server.client();
    server.jobs.set_mode("mails", Mode::Draining).await.unwrap();
    let drained = client.enqueue(&[job("a"), job("b").queue("mails")]).await;
    assert!(matches!(&drained, Err(JobsError::Draining(queue)) if queue == "mails"), "{drained:?}");
    let nobody = Wanted { worker: "an na", ..wanted() };
    let refused = client.take(&nobody).await;
    assert!(matches!(refused, Err(JobsError::Invalid(_))), "{refused:?}");
    for server in ["ftp://localhost", "localhost:7070", "", "http://", "http://a/?b"] {
        let refused = RemoteJobs::new(server, None).map(drop);
        assert!(matches!(refused, Err(JobsError::Invalid(_))), "{server}: {refused:?}");
    }
    assert!(RemoteJobs::new("http://localhost", Some("two\nlines")).is_err());
    server.end().await;
    let gone = client.enqueue(&[job("c")]).await;
    assert!(matches!(gone, Err(JobsError::Unavailable(_))), "{gone:?}");
}

#[tokio::test]
async fn many_ends_and_many_large_ones_go_in_several_requests() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start(&folder, 0).await;
    let client = server.client();
    for _ in 0..3 {
        client.enqueue(&vec![job("many"); 500]).await.unwrap();
    }
    let all = Wanted { room: u32::MAX, capacity: u32::MAX, ..wanted() };
    let taken = client.take(&all).await.unwrap();
    assert_eq!(taken.jobs.len(), 1500);
    let held: Vec<_> = taken.jobs.iter().map(|given| (given.claim, Note::default())).collect();
    assert_eq!(client.keep(&held).await.unwrap().len(), 1500);
    let large: vedetta_jobs::Json =
        serde_json::value::to_raw_value(&"x".repeat(1_000_000)).unwrap();
    let ends: Vec<_> = held
        .iter()
        .enumerate()
        .map(|(n, (claim, _))| (*claim, Fate::Done { result: (n < 12).then(|| large.clone()) }))
        .collect();
    assert_eq!(client.settle(&ends).await.unwrap().len(), 1500);
    assert_eq!(server.jobs.queues().await.unwrap()[0].done, 1500);
    server.end().await;
}

#[tokio::test]
async fn a_stream_of_wake_ups_is_opened_again_after_the_server_was_away() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start(&folder, 0).await;
    let (port, client, ear) = (server.address.port(), server.client(), Ear::default());
    soon("it opens", async { while client.woken(DEFAULT_QUEUE, &ear).await != Woken::More {} })
        .await;
    server.end().await;
    let waits = async { while client.woken(DEFAULT_QUEUE, &ear).await != Woken::More {} };
    let (server, ()) =
        soon("it opens again", async { tokio::join!(Server::start(&folder, port), waits) }).await;
    server.end().await;
}

#[tokio::test]
async fn a_server_that_people_sign_in_to_is_worked_over_tls_with_a_token() {
    let folder = tempfile::tempdir().unwrap();
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let (cert, key) = (folder.path().join("cert"), folder.path().join("key"));
    std::fs::write(&cert, made.cert.pem()).unwrap();
    std::fs::write(&key, made.signing_key.serialize_pem()).unwrap();
    let tls = vedetta_net::tls::TlsFiles { cert: cert.clone(), key, client_ca: None };
    let access = vedetta_access::Access::open(folder.path()).unwrap();
    let token = access
        .add_token("worker", vedetta_access::Role::Operator, &vedetta_access::Scope::All, None)
        .unwrap();
    let eyes = access
        .add_token("eyes", vedetta_access::Role::Viewer, &vedetta_access::Scope::All, None)
        .unwrap();
    let with = |api: Api| api.access(access, true).tls(tls.load().unwrap());
    let server = Server::start_as(&folder, 0, with).await;
    let url = format!("https://localhost:{}", server.address.port());
    let client = |token: Option<&str>| RemoteJobs::trusting(&url, token, &cert).unwrap();

    let worker = client(Some(token.reveal()));
    worker.enqueue(&[job("a")]).await.unwrap();
    let ear = Ear::default();
    soon("it opens", async { while worker.woken(DEFAULT_QUEUE, &ear).await != Woken::More {} })
        .await;
    assert_eq!(worker.take(&wanted()).await.unwrap().jobs.len(), 1);
    for refused in [client(None), client(Some("vdt_wrong")), client(Some(eyes.reveal()))] {
        let refused = refused.enqueue(&[job("b")]).await;
        assert!(matches!(refused, Err(JobsError::Failed(_))), "{refused:?}");
    }
    let stranger = RemoteJobs::new(&url, Some(token.reveal())).unwrap();
    let refused = stranger.enqueue(&[job("b")]).await;
    assert!(matches!(refused, Err(JobsError::Unavailable(_))), "nobody vouches: {refused:?}");
    server.end().await;
}
