//! Commands in a Redis, which several servers may share.
//!
//! A command that waits is a key with a TTL of Redis' own, so that one whose time is over is not there to be
//! handed out. What is done to several keys is one script, which nothing comes between.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use futures_util::StreamExt as _;
use redis::aio::{ConnectionManager, ConnectionManagerConfig};
use redis::{Client, RedisError, Script};
use tokio::sync::broadcast;
use tokio::time::{sleep, timeout};
use tokio_util::task::AbortOnDropHandle;
use vedetta_core::Backoff;

use super::{
    Bus, BusError, CommandId, KEPT, MOST, Order, Record, State, Taken, Target, WAKES, Wake, in_time,
};

/// Before every key. In braces: on a cluster all of them are on one node, as the scripts need them.
const PREFIX: &str = "{vedetta}:";
/// On it goes for whom there is something.
const CHANNEL: &str = "{vedetta}:wake";
/// For an answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// The subscription is asked whether it is there this often.
const THERE: Duration = Duration::from_secs(5);
const RECONNECT: Backoff =
    Backoff { first: Duration::from_millis(100), most: Duration::from_secs(5), jitter: 0.2 };

const PUT: &str = include_str!("redis/put.lua");
const TAKE: &str = include_str!("redis/take.lua");
const APPLIED: &str = include_str!("redis/applied.lua");

/// The commands of one Redis; clones share them.
#[derive(Clone)]
pub struct RedisBus {
    connection: ConnectionManager,
    scripts: Arc<Scripts>,
    wakes: broadcast::Sender<Wake>,
    /// Wakes for what is put, as long as somebody is left to hear it.
    _listener: Arc<AbortOnDropHandle<()>>,
}

struct Scripts {
    put: Script,
    take: Script,
    applied: Script,
}

impl std::fmt::Debug for RedisBus {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RedisBus").finish_non_exhaustive()
    }
}

impl From<RedisError> for BusError {
    fn from(error: RedisError) -> Self {
        let again = error.is_io_error()
            || error.is_timeout()
            || error.is_connection_dropped()
            || matches!(error.code(), Some("LOADING" | "BUSY" | "TRYAGAIN" | "READONLY"));
        match error.code() {
            Some("VEDETTAFULL") => Self::TooMany,
            _ if again => Self::Unavailable(Box::new(error)),
            _ => Self::Failed(Box::new(error)),
        }
    }
}

impl RedisBus {
    /// Connects to `redis://user:password@host:port/number`. It has to be called where tokio runs.
    pub async fn open(url: &str) -> Result<Self, BusError> {
        if !url.starts_with("redis://") {
            let why = "it is \"redis://user:password@host:6379\", without TLS";
            return Err(BusError::BadUrl(why.into()));
        }
        // What it says may quote the password.
        let client = Client::open(url).map_err(|error| BusError::BadUrl(error.kind_text()))?;
        let config = ConnectionManagerConfig::new()
            .set_number_of_retries(0)
            .set_connection_timeout(Some(PATIENCE))
            .set_response_timeout(Some(PATIENCE));
        let connection = ConnectionManager::new_with_config(client.clone(), config).await?;
        let wakes = broadcast::Sender::new(WAKES);
        let listener = tokio::spawn(listen(client, wakes.clone()));
        let scripts = Scripts {
            put: Script::new(PUT),
            take: Script::new(TAKE),
            applied: Script::new(APPLIED),
        };
        Ok(Self {
            connection,
            scripts: Arc::new(scripts),
            wakes,
            _listener: Arc::new(AbortOnDropHandle::new(listener)),
        })
    }
}

/// What kind of error, and nothing of what was given.
trait KindText {
    fn kind_text(&self) -> String;
}

impl KindText for RedisError {
    fn kind_text(&self) -> String {
        format!("{:?}", self.kind())
    }
}

/// Hears what is put, across lost connections.
async fn listen(client: Client, tell: broadcast::Sender<Wake>) {
    let mut failures = 0;
    loop {
        if let Err(error) = follow(&client, &tell, &mut failures).await {
            let wait = RECONNECT.delay(failures, fastrand::f64());
            if failures == 0 {
                tracing::warn!(error = error.kind_text(), "not listening to Redis; trying again");
            }
            failures = failures.saturating_add(1);
            sleep(wait).await;
        }
    }
}

/// One connection, until it is lost.
async fn follow(
    client: &Client,
    tell: &broadcast::Sender<Wake>,
    failures: &mut u32,
) -> Result<(), RedisError> {
    let late = |_| RedisError::from(std::io::Error::from(std::io::ErrorKind::TimedOut));
    let (mut sink, mut messages) =
        timeout(PATIENCE, client.get_async_pubsub()).await.map_err(late)??.split();
    timeout(PATIENCE, sink.subscribe(CHANNEL)).await.map_err(late)??;
    *failures = 0;
    // What was put before nobody told.
    let _ = tell.send(Wake::Any);
    loop {
        match timeout(THERE, messages.next()).await {
            Ok(Some(message)) => {
                let target: String = message.get_payload()?;
                // Nobody has to listen.
                let _ = tell.send(Wake::Of(Target::from_key(target)));
            }
            Ok(None) => {
                return Err(std::io::Error::from(std::io::ErrorKind::ConnectionReset).into());
            }
            Err(_) => timeout(THERE, sink.ping::<redis::Value>()).await.map(drop).map_err(late)?,
        }
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX).max(1)
}

fn at(millis: u64) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_millis(millis)
}

/// What was stored was a command.
fn order(text: &str) -> Result<Order, BusError> {
    text.parse().map_err(|error: String| BusError::Failed(error.into()))
}

fn state(word: &str) -> State {
    match word {
        "taken" => State::Taken,
        "applied" => State::Applied,
        "replaced" => State::Replaced,
        _ => State::Requested,
    }
}

fn waiting_key(target: &Target) -> String {
    format!("{PREFIX}waiting:{}", target.key())
}

#[async_trait]
impl Bus for RedisBus {
    async fn put(&self, target: &Target, order: &Order, ttl: Duration) -> Result<Record, BusError> {
        let id = CommandId::random();
        let answer: (String, u64, u64) = self
            .scripts
            .put
            .key(waiting_key(target))
            .arg(PREFIX)
            .arg(&id.0)
            .arg(target.key())
            .arg(order.to_string())
            .arg(millis(ttl))
            .arg(millis(KEPT))
            .arg(order.replaces().join(","))
            .arg(order.yields_to().join(","))
            .arg(MOST)
            .arg(CHANNEL)
            .invoke_async(&mut self.connection.clone())
            .await?;
        let (word, created, expires) = answer;
        Ok(Record {
            id,
            target: target.clone(),
            order: order.clone(),
            state: state(&word),
            created: at(created),
            expires: at(expires),
        })
    }

    async fn take(&self, target: &Target) -> Result<Vec<Taken>, BusError> {
        let taken: Vec<(String, String, u64)> = self
            .scripts
            .take
            .key(waiting_key(target))
            .arg(PREFIX)
            .invoke_async(&mut self.connection.clone())
            .await?;
        let taken = taken.into_iter().map(|(id, text, left)| {
            let left = Duration::from_millis(left);
            Ok(Taken { id: CommandId(id), order: order(&text)?, left })
        });
        taken.collect()
    }

    async fn applied(&self, ids: &[CommandId]) -> Result<(), BusError> {
        for id in ids {
            let key = format!("{PREFIX}record:{}", id.0);
            let mut connection = self.connection.clone();
            self.scripts.applied.key(key).invoke_async::<()>(&mut connection).await?;
        }
        Ok(())
    }

    async fn command(&self, id: &CommandId) -> Result<Option<Record>, BusError> {
        let mut ask = redis::pipe();
        ask.cmd("HMGET").arg(format!("{PREFIX}record:{}", id.0));
        ask.arg(&["target", "value", "state", "created", "expires"]);
        ask.cmd("TIME");
        let (found, now): (Vec<Option<String>>, (u64, u64)) =
            ask.query_async(&mut self.connection.clone()).await?;
        let found = <[Option<String>; 5]>::try_from(found).unwrap_or_default();
        let [Some(target), Some(text), Some(word), Some(created), Some(expires)] = found else {
            return Ok(None);
        };
        let number = |text: &str| text.parse::<u64>().unwrap_or_default();
        let (expires, now) = (number(&expires), now.0 * 1000 + now.1 / 1000);
        Ok(Some(Record {
            id: id.clone(),
            target: Target::from_key(target),
            order: order(&text)?,
            state: in_time(state(&word), expires <= now),
            created: at(number(&created)),
            expires: at(expires),
        }))
    }

    async fn waiting(&self, targets: &[Target]) -> Result<Vec<Target>, BusError> {
        if targets.is_empty() {
            return Ok(Vec::new());
        }
        let mut ask = redis::pipe();
        for target in targets {
            ask.cmd("EXISTS").arg(waiting_key(target));
        }
        let there: Vec<bool> = ask.query_async(&mut self.connection.clone()).await?;
        Ok(targets
            .iter()
            .zip(there)
            .filter(|(_, there)| *there)
            .map(|(target, _)| target.clone())
            .collect())
    }

    fn wakes(&self) -> broadcast::Receiver<Wake> {
        self.wakes.subscribe()
    }
}
