//! The watcher, on changes from memory and on the embedded store.

use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use vedetta_core::{Change, Changes, Feed, KeyRange, Page, Revision, Source, SourceError};
use vedetta_kv::Put;
use vedetta_runtime::watcher::{BoxError, Effect, Id};
use vedetta_runtime::{Next, Reconcile, State, Watcher};

use super::{PARALLEL, Running, Seen, Spec};
use crate::setup;

/// Tasks that put at the same time.
const PUTTING: u32 = 256;

#[derive(Debug, Clone, Default)]
struct Thing(Option<Spec>);

impl State for Thing {
    fn apply(&mut self, _: &str, value: Option<&[u8]>) -> Result<Effect, BoxError> {
        self.0 = value.map(serde_json::from_slice).transpose()?;
        Ok(Effect::Wanted)
    }
}

struct Hand(Arc<Seen>);

impl Reconcile for Hand {
    type State = Thing;

    async fn reconcile(&self, _: &Id, state: Option<&Thing>) -> Result<Next, BoxError> {
        let spec = state.and_then(|thing| thing.0.as_ref()).ok_or("nothing is deleted here")?;
        self.0.handled(spec.change);
        Ok(Next::Done)
    }
}

fn watcher() -> Watcher {
    Watcher::new("/things/").parallel(PARALLEL)
}

pub(super) fn start(seen: &Arc<Seen>) -> Running {
    Box::new(watcher().start(Scripted(Arc::clone(seen)), Hand(Arc::clone(seen))))
}

/// The same changes, put durably into a store by many.
pub(super) async fn start_on_store(seen: &Arc<Seen>) -> anyhow::Result<Running> {
    let folder = setup::folder()?;
    let store = setup::open(folder.path()).await?;
    let watching = watcher().start(store.clone(), Hand(Arc::clone(seen)));
    watching.ready(Duration::from_secs(10)).await?;
    let stop = CancellationToken::new();
    let mut putting = JoinSet::new();
    for task in 0..PUTTING {
        let (store, seen, stop) = (store.clone(), Arc::clone(seen), stop.clone());
        putting.spawn(async move {
            let script = seen.script;
            // The changes of an id are `ids` apart and belong to one task, so they stay in order.
            let rounds = (0..script.changes).step_by(script.ids as usize);
            let mine = rounds.flat_map(|round| {
                (task..script.ids).step_by(PUTTING as usize).map(move |n| round + n)
            });
            for change in mine {
                tokio::time::sleep_until((seen.began + script.due(change)).into()).await;
                let (key, value) = (seen.tape.key(change), seen.tape.value(change));
                let put = store.put(Put::new(key.clone(), value.clone()));
                tokio::select! {
                    done = put => drop(done.expect("a put succeeds")),
                    () = stop.cancelled() => return,
                }
            }
        });
    }
    Ok(Box::new((stop.drop_guard(), putting, watching, store, folder)))
}

/// Changes from memory.
struct Scripted(Arc<Seen>);

impl Source for Scripted {
    type Feed = ScriptedFeed;

    async fn list(&self, _: KeyRange, _: Option<Revision>) -> Result<Page, SourceError> {
        Ok(Page { revision: Revision::FRESH, ..Page::default() })
    }

    async fn follow(
        &self,
        _: KeyRange,
        _: Revision,
    ) -> Result<(ScriptedFeed, Revision), SourceError> {
        let feed = ScriptedFeed { seen: Arc::clone(&self.0), next: 0 };
        Ok((feed, Revision::FRESH))
    }
}

struct ScriptedFeed {
    seen: Arc<Seen>,
    next: u32,
}

impl Feed for ScriptedFeed {
    async fn next(&mut self) -> Result<Changes, SourceError> {
        let now = self.seen.script.next(self.seen.began, self.next).await;
        self.next = now.end;
        let changes = now.clone().map(|change| Change {
            key: self.seen.tape.key(change).clone(),
            value: Some(self.seen.tape.value(change).clone()),
            revision: Revision(u64::from(change) + 2),
        });
        Ok(Changes { changes: changes.collect(), revision: Revision(u64::from(now.end) + 1) })
    }
}
