//! Watchers at the embedded store: in its folder, over a line that can be cut.

mod real;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use parking_lot::Mutex;
use real::{LOOK_AGAIN, Pen, Place, Stage, Write, suite};
use tempfile::TempDir;
use testing::soon;
use tokio::sync::watch;
use vedetta_core::{Changes, Feed, KeyRange, Page, Revision, Source, SourceError};
use vedetta_db::{CommitError, Db};
use vedetta_kv::{Delete, KvError, Op, Options, Put, Range, SCHEMA, Store, Txn};

/// A store, and the only line to it. Clones share both.
#[derive(Clone)]
struct Embedded {
    folder: Arc<Mutex<TempDir>>,
    link: Arc<watch::Sender<Link>>,
}

#[derive(Clone)]
struct Link {
    store: Store,
    whole: bool,
    /// Feeds of an earlier one have ended.
    cuts: u64,
}

impl Embedded {
    async fn open() -> Self {
        let folder = TempDir::new().unwrap();
        let store = open_at(folder.path()).await;
        let link = watch::Sender::new(Link { store, whole: true, cuts: 0 });
        Self { folder: Arc::new(Mutex::new(folder)), link: Arc::new(link) }
    }

    fn store(&self) -> Store {
        self.link.borrow().store.clone()
    }

    async fn close(&self) {
        soon("the store closes", self.store().close()).await;
    }

    /// Opens what was closed.
    async fn reopen(&self) {
        let path = self.folder.lock().path().to_owned();
        let store = open_at(&path).await;
        self.link.send_modify(|link| link.store = store);
    }

    /// Another store in the place of this one, which was closed.
    async fn begin_anew(&self) {
        *self.folder.lock() = TempDir::new().unwrap();
        self.reopen().await;
    }

    fn line(&self) -> Result<Link, SourceError> {
        let link = self.link.borrow().clone();
        if link.whole { Ok(link) } else { Err(SourceError::lost("the line is cut")) }
    }
}

async fn open_at(folder: &Path) -> Store {
    let mut options = vedetta_db::Options::new(folder.join("vedetta.db"));
    options.ballast = 0;
    let db = Db::open(&options, &[SCHEMA]).unwrap();
    Store::open(db, Options::default()).await.unwrap()
}

impl Source for Embedded {
    type Feed = Line;

    async fn list(&self, range: KeyRange, at: Option<Revision>) -> Result<Page, SourceError> {
        self.line()?.store.list(range, at).await
    }

    async fn follow(
        &self,
        range: KeyRange,
        from: Revision,
    ) -> Result<(Line, Revision), SourceError> {
        let Link { store, cuts, .. } = self.line()?;
        let (feed, revision) = store.follow(range, from).await?;
        Ok((Line { feed, link: self.link.subscribe(), cuts }, revision))
    }
}

/// A feed until the line is cut.
struct Line {
    feed: vedetta_kv::StoreFeed,
    link: watch::Receiver<Link>,
    cuts: u64,
}

impl Feed for Line {
    fn owed(&self) -> Revision {
        self.feed.owed()
    }

    async fn next(&mut self) -> Result<Changes, SourceError> {
        tokio::select! {
            _ = self.link.wait_for(|link| link.cuts != self.cuts) => {
                Err(SourceError::lost("the line was cut"))
            }
            changes = Feed::next(&mut self.feed) => changes,
        }
    }
}

impl Pen for Embedded {
    async fn write(&self, writes: Vec<Write>) -> Revision {
        let op = |(key, value): Write| match value {
            Some(value) => Op::Put(Put::new(key, value)),
            None => Op::Delete(Delete { range: KeyRange::One(key.into()), previous: false }),
        };
        let txn = Txn { then: writes.into_iter().map(op).collect(), ..Txn::default() };
        loop {
            match self.store().txn(txn.clone()).await {
                Ok(done) => return done.revision,
                Err(KvError::Lost(CommitError::Closed)) => tokio::time::sleep(LOOK_AGAIN).await,
                Err(error) => panic!("{error}"),
            }
        }
    }

    async fn keys(&self, prefix: &str) -> BTreeMap<Bytes, Bytes> {
        let prefix = Bytes::copy_from_slice(prefix.as_bytes());
        let found = self.store().range(Range::new(KeyRange::prefix(prefix))).await.unwrap();
        let both = |bytes: &[u8]| Bytes::copy_from_slice(bytes);
        found.keys.iter().map(|found| (both(found.key()), both(found.value()))).collect()
    }

    async fn compact(&self) {
        let store = self.store();
        store.compact(store.revision(), true).await.unwrap();
    }
}

impl Place for Embedded {
    type Source = Self;
    type Pen = Self;
    const PAGE: usize = 10_000;

    fn source(&self) -> Self {
        self.clone()
    }

    fn pen(&self) -> &Self {
        self
    }

    fn cut(&self) {
        self.link.send_modify(|link| (link.whole, link.cuts) = (false, link.cuts + 1));
    }

    fn mend(&self) {
        self.link.send_modify(|link| link.whole = true);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_watcher_of_the_embedded_store_holds_what_it_promises() {
    let place = Embedded::open().await;
    suite::holds_at(&place).await;
    place.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whatever_happens_to_the_embedded_store_its_watcher_ends_as_it_says() {
    let place = Embedded::open().await;
    let stage = Stage::ready(&place, "/rooms/").await;
    stage.reality.is_clumsy(10);

    stage
        .chapter("the store closes and opens again", async |writer| {
            for _ in 0..3 {
                stage.loses_its_line(async || place.close().await).await;
                place.reopen().await;
                writer.goes_on().await;
            }
        })
        .await;
    stage
        .chapter("the line is cut", async |writer| {
            for _ in 0..3 {
                stage.loses_its_line(async || place.cut()).await;
                writer.goes_on().await;
                place.mend();
                writer.goes_on().await;
            }
        })
        .await;
    assert_eq!(stage.watching.status().lists, 1, "all of it was in the history");

    stage.crowd(true).await;
    stage
        .chapter("keys go while it is away, and their history", async |writer| {
            stage.loses_its_line(async || place.cut()).await;
            stage.crowd(false).await;
            writer.goes_on().await;
            stage.pen.compact().await;
            place.mend();
        })
        .await;
    assert_eq!(stage.watching.status().lists, 2);

    stage
        .chapter("the store closes, and opens without that history", async |writer| {
            stage.loses_its_line(async || place.cut()).await;
            writer.goes_on().await;
            stage.pen.compact().await;
            place.close().await;
            place.reopen().await;
            place.mend();
        })
        .await;
    assert_eq!(stage.watching.status().lists, 3);

    // Another store takes its place. Nothing is written before that is seen: it is known by its revision.
    stage.crowd(true).await;
    stage.loses_its_line(async || place.close().await).await;
    place.begin_anew().await;
    stage.settles().await;
    assert_eq!(stage.watching.status().lists, 4, "its revisions began anew");
    stage.chapter("the other store goes on", async |writer| writer.goes_on().await).await;
    stage.end().await;
    place.close().await;
}
