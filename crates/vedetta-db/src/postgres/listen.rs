//! Hearing what others announce, across lost connections.

use std::convert::Infallible;
use std::error::Error as _;
use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::sync::mpsc;
use tokio_postgres::{AsyncMessage, Client, Connection, Socket};
use tokio_util::task::AbortOnDropHandle;
use vedetta_core::Backoff;

use super::tls::Encrypted;
use super::url::Target;
use super::{PostgresError, within};

/// Notifications that may wait to be taken; beyond that they are dropped, and that is told.
const WAITING: usize = 1024;
/// How often the server is asked whether it is there, and how long it may take to say so. A link that is
/// cut in silence would else go unnoticed until somebody misses something.
const THERE: Duration = Duration::from_secs(5);
const RECONNECT: Backoff =
    Backoff { first: Duration::from_millis(100), most: Duration::from_secs(10), jitter: 0.2 };

/// What a [`Listener`] tells.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Heard {
    /// Somebody announced this.
    Notified(String),
    /// It listens (again) from now on, and something may have been missed before: look for yourself.
    Again,
}

/// Listens on one channel, on a connection of its own, which it replaces when it is lost.
#[derive(Debug)]
pub struct Listener {
    heard: mpsc::Receiver<Heard>,
    missed: Arc<AtomicBool>,
    _task: AbortOnDropHandle<()>,
}

impl Listener {
    pub(super) fn start(target: Target, channel: &str) -> Self {
        let (tell, heard) = mpsc::channel(WAITING);
        let missed = Arc::new(AtomicBool::new(false));
        let listen = format!("LISTEN \"{}\"", channel.replace('"', "\"\""));
        let line = Line { target, listen, tell, missed: Arc::clone(&missed) };
        Self { heard, missed, _task: AbortOnDropHandle::new(tokio::spawn(line.keep())) }
    }

    /// What comes next; the first is [`Heard::Again`]. While the server is away it waits.
    ///
    /// Cancel safety: nothing is lost when this is dropped.
    pub async fn next(&mut self) -> Heard {
        if self.missed.swap(false, Ordering::AcqRel) {
            // Whoever looks for himself sees what these would tell.
            while self.heard.try_recv().is_ok() {}
            return Heard::Again;
        }
        match self.heard.recv().await {
            Some(heard) => heard,
            // The runtime is shutting down, and nothing comes any more.
            None => std::future::pending().await,
        }
    }
}

/// What the task of a listener owns.
struct Line {
    target: Target,
    listen: String,
    tell: mpsc::Sender<Heard>,
    missed: Arc<AtomicBool>,
}

impl Line {
    async fn keep(self) {
        let mut failures = 0;
        loop {
            let Err(error) = self.follow(&mut failures).await;
            let wait = RECONNECT.delay(failures, fastrand::f64());
            failures = failures.saturating_add(1);
            warn(&error, wait);
            tokio::time::sleep(wait).await;
        }
    }

    /// One connection, until it is lost.
    async fn follow(&self, failures: &mut u32) -> Result<Infallible, PostgresError> {
        let Target { config, tls, patience, .. } = &self.target;
        let connected = tokio::time::timeout(*patience, config.connect(tls.clone())).await;
        let connected = connected.map_err(|late| self.target.unreachable(late.into()))?;
        let (client, mut connection) = connected.map_err(|error| self.target.failed(error))?;
        tokio::select! {
            listening = within(THERE, client.batch_execute(&self.listen)) => listening?,
            // What is announced before we say that we listen, is seen by whoever looks then.
            Err(error) = each(&mut connection, |_| ()) => return Err(error),
        }
        *failures = 0;
        self.tell(Heard::Again);
        tokio::select! {
            lost = stay(&client) => lost,
            lost = each(&mut connection, |payload| self.tell(Heard::Notified(payload))) => lost,
        }
    }

    fn tell(&self, heard: Heard) {
        if self.tell.try_send(heard).is_err() {
            self.missed.store(true, Ordering::Release);
            // All may have been taken just now, and who waits must hear of it.
            let _ = self.tell.try_send(Heard::Again);
        }
    }
}

fn warn(error: &PostgresError, wait: Duration) {
    let cause = error.source();
    tracing::warn!(%error, cause, ?wait, "not listening to PostgreSQL; trying again");
}

/// Drives the connection, and passes on every notification.
async fn each(
    connection: &mut Connection<Socket, Encrypted>,
    mut notified: impl FnMut(String),
) -> Result<Infallible, PostgresError> {
    while let Some(message) = poll_fn(|cx| connection.poll_message(cx)).await {
        if let AsyncMessage::Notification(notification) = message? {
            notified(notification.payload().to_owned());
        }
    }
    Err(PostgresError::Lost("the server ended it".into()))
}

/// Ends when the server does not answer any more.
async fn stay(client: &Client) -> Result<Infallible, PostgresError> {
    loop {
        tokio::time::sleep(THERE).await;
        within(THERE, client.simple_query("")).await?;
    }
}
