//! One life of a store beside the model's.

use std::fmt::Debug;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::mpsc;
use std::task::Poll;
use std::time::{Duration, Instant};

use tempfile::TempDir;
use vedetta_core::{KeyRange, Revision};
use vedetta_db::{Db, Purpose, Stop};
use vedetta_kv::{
    Deleted, Event, LeaseId, LeaseInfo, Options, PutDone, Range, SCHEMA, Store, TxnDone,
    WatchError, WatchOptions, Watcher,
};

use crate::plan::{SLOTS, Standing, Step, Write, brief};
use crate::reference::{Answer, Model, Refusal};

/// Why the two disagree.
pub(crate) type Verdict<T = ()> = Result<T, String>;

/// Long enough that nothing expires by itself.
const TTL: Duration = Duration::from_secs(3600);
/// Of the lease that does.
const BRIEF: Duration = Duration::from_millis(5);
/// A step that takes longer than this hangs.
const PATIENCE: Duration = Duration::from_secs(20);

/// Runs the steps on a fresh store and on a fresh model.
pub(crate) async fn live(steps: Vec<Step>) -> Verdict {
    let mut life = Life::begin().await?;
    for (n, step) in steps.into_iter().enumerate() {
        let step = life.put_right(step);
        let told = format!("{step:?}");
        let done = soon(life.take(step)).await.and_then(|done| done);
        done.map_err(|why| format!("step {n}, {told}: {why}"))?;
    }
    soon(life.end()).await.and_then(|done| done).map_err(|why| format!("at the end: {why}"))
}

struct Life {
    folder: TempDir,
    db: Db,
    store: Store,
    /// Where the store stood when it was opened: what came before is in the file only.
    opened: Revision,
    born: Instant,
    model: Model,
    follows: [Option<Follow>; SLOTS],
}

/// A watcher and what we know of it.
struct Follow {
    watcher: Watcher,
    range: KeyRange,
    options: WatchOptions,
    /// It was handed everything before.
    next: Revision,
}

/// What a write was answered.
#[derive(Debug, PartialEq)]
enum Reply {
    Put(Answer<PutDone>),
    Delete(Answer<Deleted>),
    Txn(Answer<TxnDone>),
    Compact(Answer<()>),
    Grant(Answer<LeaseId>),
    Revoke(Answer<Revision>),
}

impl Life {
    async fn begin() -> Verdict<Self> {
        // In memory where there is such a place: what the disk does is the torture suite's matter.
        let memory = std::path::Path::new("/dev/shm");
        let folder =
            if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() };
        let folder = folder.map_err(text)?;
        let (db, store) = open(&folder).await?;
        Ok(Self {
            folder,
            db,
            store,
            opened: Revision::FRESH,
            born: Instant::now(),
            model: Model::new(),
            follows: [const { None }; SLOTS],
        })
    }

    fn put_right(&self, mut step: Step) -> Step {
        let standing = Standing { current: self.model.revision(), oldest: self.model.compacted };
        match &mut step {
            Step::Write(write) => standing.right_write(write),
            Step::Together(writes) => {
                writes.iter_mut().for_each(|write| standing.right_write(write));
            }
            Step::Range(range) => standing.right_range(range),
            Step::Watch { options, .. } => standing.right_watch(options),
            _ => {}
        }
        step
    }

    async fn take(&mut self, step: Step) -> Verdict {
        match step {
            Step::Write(write) => {
                let got = ask(self.store.clone(), write.clone()).await;
                let want = self.expect(&write, &got);
                same("the answer", &got, &want)?;
                if let (Write::Compact { swept: true, .. }, Reply::Compact(Ok(()))) = (write, got) {
                    let kept = self.store.status().keys;
                    same("the keys remembered", &kept, &self.model.remembered())?;
                }
            }
            Step::Together(writes) => self.together(writes).await?,
            Step::Range(range) => {
                let got = self.store.range(range.clone()).await.map_err(Refusal::from);
                same("the answer", &got, &self.model.range(&range))?;
            }
            Step::KeepAlive(id) => {
                let got = self.store.keep_alive(id).await.map_err(Refusal::from);
                same("the answer", &got, &self.model.keep_alive(id))?;
            }
            Step::Expire(puts) => {
                // In one commit: else the lease might end before it has its keys.
                let puts = puts.into_iter().map(Write::Put);
                self.together(std::iter::once(Write::GrantBrief).chain(puts).collect()).await?;
                while self.store.lease(brief()).is_some() {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
                same("whether there was one", &self.model.expire(brief()).is_ok(), &true)?;
            }
            Step::Watch { slot, range, options } => {
                self.follows[slot] = self.follow(range, options)?;
            }
            Step::Drain { slot } => self.drain(slot).await?,
            Step::Unwatch { slot } => self.follows[slot] = None,
            Step::Restart => self.restart().await?,
        }
        self.agree().await
    }

    /// What the model answers to a write; it may look at the answer for what chance decides.
    fn expect(&mut self, write: &Write, got: &Reply) -> Reply {
        let model = &mut self.model;
        match write {
            Write::Put(put) => Reply::Put(model.put(put)),
            Write::Delete(delete) => Reply::Delete(model.delete(delete)),
            Write::Txn(txn) => Reply::Txn(model.txn(txn)),
            Write::Compact { at, .. } => Reply::Compact(model.compact(*at)),
            Write::Grant(wished) => {
                let chosen = match got {
                    Reply::Grant(Ok(id)) => Some(*id),
                    _ => None,
                };
                let id = wished.or(chosen).unwrap_or(LeaseId::new(i64::MIN).unwrap());
                Reply::Grant(model.grant(id, TTL))
            }
            Write::GrantBrief => Reply::Grant(model.grant(brief(), BRIEF)),
            Write::Revoke(id) => Reply::Revoke(model.revoke(*id)),
        }
    }

    /// Lines the writes up behind one that holds the writer, so that they share a commit.
    async fn together(&mut self, writes: Vec<Write>) -> Verdict {
        let (started, has_started) = tokio::sync::oneshot::channel();
        let (release, released) = mpsc::channel::<()>();
        let db = self.db.clone();
        let hold = tokio::spawn(async move {
            db.write(Purpose::Store, move |_| {
                let _ = started.send(());
                let _ = released.recv();
                Err::<(), _>(Stop::Refused(()))
            })
            .await
        });
        has_started.await.map_err(text)?;
        let mut waiting: Vec<Pin<Box<dyn Future<Output = Reply>>>> = Vec::new();
        let mut replies = Vec::new();
        for write in &writes {
            let mut asked = Box::pin(ask(self.store.clone(), write.clone()));
            let first = poll_fn(|context| Poll::Ready(asked.as_mut().poll(context))).await;
            replies.push(match first {
                Poll::Ready(reply) => Some(reply),
                Poll::Pending => None,
            });
            waiting.push(asked);
        }
        drop(release);
        let _ = hold.await;
        for (write, (reply, asked)) in writes.iter().zip(replies.into_iter().zip(waiting)) {
            let got = match reply {
                Some(reply) => reply,
                None => asked.await,
            };
            let want = self.expect(write, &got);
            same(&format!("the answer to {write:?}"), &got, &want)?;
        }
        Ok(())
    }

    fn follow(&mut self, range: KeyRange, options: WatchOptions) -> Verdict<Option<Follow>> {
        let next = options.from.unwrap_or(Revision(self.model.revision().0 + 1));
        let oldest = self.model.compacted;
        match self.store.watch(range.clone(), options.clone()) {
            Ok(_) if next < oldest => {
                Err(format!("a watch from {next} began, the oldest kept is {oldest}"))
            }
            Ok(watcher) => {
                // Nothing happened before the first write, so nothing of it can be lost.
                let next = next.max(Revision(2));
                Ok(Some(Follow { watcher, range, options, next }))
            }
            Err(WatchError::Compacted { asked, oldest: told }) => {
                same("whether history is gone", &(next < oldest), &true)?;
                same("asked and oldest", &(asked, told), &(next, oldest))?;
                Ok(None)
            }
            Err(other) => Err(format!("{other:?}")),
        }
    }

    /// Takes everything a watcher is owed, and makes sure that it is owed no more.
    async fn drain(&mut self, slot: usize) -> Verdict {
        let Some(mut follow) = self.follows[slot].take() else { return Ok(()) };
        let (revision, oldest) = (self.model.revision(), self.model.compacted);
        if follow.next <= self.opened && follow.next < oldest {
            return match follow.watcher.next().await {
                Err(WatchError::Compacted { asked, oldest: told }) => {
                    same("asked and oldest", &(asked, told), &(follow.next, oldest))
                }
                other => Err(format!("{other:?} although {} was compacted", follow.next)),
            };
        }
        let owed = self.model.owed(&follow.range, &follow.options, follow.next);
        let mut seen = 0;
        while seen < owed.len() {
            let left = &owed[seen..];
            let batch = soon(follow.watcher.next()).await;
            let batch = batch.map_err(|why| format!("{why}; still owed: {left:?}"))?;
            let batch = batch.map_err(|why| format!("{why:?}; still owed: {left:?}"))?;
            let batch: Vec<_> = batch.iter().cloned().collect();
            same("an empty batch", &batch.is_empty(), &false)?;
            for got in &batch {
                let want = owed.get(seen).ok_or_else(|| format!("{got:?} is not owed"))?;
                self.same_event(&follow.options, got, want)?;
                seen += 1;
            }
            let last = &batch[batch.len() - 1];
            if owed.get(seen).is_some_and(|next| next.revision == last.revision) {
                return Err(format!("revision {} came in two parts", last.revision));
            }
        }
        settle(&mut follow.watcher, revision).await?;
        follow.next = follow.next.max(Revision(revision.0 + 1));
        self.follows[slot] = Some(follow);
        Ok(())
    }

    fn same_event(&self, options: &WatchOptions, got: &Event, want: &Event) -> Verdict {
        same("the revision", &got.revision, &want.revision)?;
        same("the change", &got.change, &want.change)?;
        let may_lack = !options.previous || self.model.may_lack_previous(want);
        if got.previous.is_some() || !may_lack {
            same(&format!("the value before {want:?}"), &got.previous, &want.previous)?;
        }
        Ok(())
    }

    /// Closes the store, opens it again, and lets every watcher go on from where it was.
    async fn restart(&mut self) -> Verdict {
        self.store.close().await;
        for follow in self.follows.iter_mut().flatten() {
            match follow.watcher.next().await {
                Err(WatchError::Closed) => {}
                other => return Err(format!("a watcher of a closed store was told {other:?}")),
            }
        }
        (self.db, self.store) = open(&self.folder).await?;
        self.opened = self.model.revision();
        for slot in 0..SLOTS {
            if let Some(Follow { range, options, next, .. }) = self.follows[slot].take() {
                let options = WatchOptions { from: Some(next), ..options };
                self.follows[slot] = self.follow(range, options)?;
            }
        }
        Ok(())
    }

    /// Compares what can be seen without disturbing anything.
    async fn agree(&self) -> Verdict {
        let status = self.store.status();
        let watchers = self.follows.iter().flatten().count();
        let seen = (status.revision, status.compacted, status.leases, status.watchers);
        let model = &self.model;
        let wanted = (model.revision(), model.compacted, model.leases.len(), watchers);
        same("the status", &seen, &wanted)?;
        let everything = Range::new(KeyRange::all());
        let got = self.store.range(everything.clone()).await.map_err(Refusal::from);
        same("the keys", &got, &model.range(&everything))?;
        let ids: Vec<_> = model.leases.keys().copied().collect();
        same("the leases", &self.store.leases(), &ids)?;
        for id in ids {
            let Some(info) = self.store.lease(id) else { return Err(format!("no lease {id}")) };
            let least = TTL.saturating_sub(self.born.elapsed());
            let LeaseInfo { ttl, remaining, keys, .. } = info;
            same("the lease", &(ttl, keys), &(TTL, model.keys_of(id)))?;
            same("whether time is left", &(least <= remaining && remaining <= TTL), &true)?;
        }
        let unknown = LeaseId::new(i64::MAX).unwrap();
        same("an unknown lease", &self.store.lease(unknown), &None)
    }

    /// Takes what all watchers are owed, then looks at the whole past, before and after a restart.
    async fn end(mut self) -> Verdict {
        for slot in 0..SLOTS {
            self.drain(slot).await?;
        }
        for _ in 0..2 {
            self.audit().await?;
            self.restart().await?;
            self.agree().await?;
        }
        self.store.close().await;
        Ok(())
    }

    /// Every kept revision is as it was, and watching from the oldest one tells the whole story.
    async fn audit(&mut self) -> Verdict {
        let (current, oldest) = (self.model.revision(), self.model.compacted);
        for at in oldest.0..=current.0 {
            let mut then = Range::new(KeyRange::all());
            then.at = Some(Revision(at));
            let got = self.store.range(then.clone()).await.map_err(Refusal::from);
            same(&format!("the keys at {at}"), &got, &self.model.range(&then))?;
        }
        let options = WatchOptions { from: Some(oldest), ..WatchOptions::default() };
        self.follows[0] = self.follow(KeyRange::all(), options)?;
        self.drain(0).await?;
        self.follows[0] = None;
        Ok(())
    }
}

async fn open(folder: &TempDir) -> Verdict<(Db, Store)> {
    let mut options = vedetta_db::Options::new(folder.path().join("vedetta.db"));
    (options.ballast, options.readers) = (0, 2);
    let db = Db::open(&options, &[SCHEMA]).map_err(text)?;
    let store = Store::open(db.clone(), Options::default()).await.map_err(text)?;
    Ok((db, store))
}

async fn ask(store: Store, write: Write) -> Reply {
    match write {
        Write::Put(put) => Reply::Put(store.put(put).await.map_err(Refusal::from)),
        Write::Delete(delete) => Reply::Delete(store.delete(delete).await.map_err(Refusal::from)),
        Write::Txn(txn) => Reply::Txn(store.txn(txn).await.map_err(Refusal::from)),
        Write::Compact { at, swept } => {
            Reply::Compact(store.compact(at, swept).await.map_err(Refusal::from))
        }
        Write::Grant(id) => Reply::Grant(store.grant(id, TTL).await.map_err(Refusal::from)),
        Write::GrantBrief => {
            Reply::Grant(store.grant(Some(brief()), BRIEF).await.map_err(Refusal::from))
        }
        Write::Revoke(id) => Reply::Revoke(store.revoke(id).await.map_err(Refusal::from)),
    }
}

/// Waits until the watcher knows that nothing up to `revision` is left for it; nothing may come.
async fn settle(watcher: &mut Watcher, revision: Revision) -> Verdict {
    let begun = Instant::now();
    let mut moment = Duration::ZERO;
    loop {
        let progress = watcher.progress();
        if let Ok(extra) = tokio::time::timeout(moment, watcher.next()).await {
            return Err(format!("not owed, and came: {extra:?}"));
        }
        if progress >= revision {
            return Ok(());
        }
        if begun.elapsed() > PATIENCE {
            return Err(format!("progress stays at {progress}, the store is at {revision}"));
        }
        moment = moment * 2 + Duration::from_micros(100);
    }
}

async fn soon<T>(work: impl Future<Output = T>) -> Verdict<T> {
    tokio::time::timeout(PATIENCE, work).await.map_err(|_| "it hangs".to_owned())
}

fn same<T: Debug + PartialEq>(what: &str, got: &T, want: &T) -> Verdict {
    if got == want { Ok(()) } else { Err(format!("{what}: got {got:?}, expected {want:?}")) }
}

fn text(error: impl Debug) -> String {
    format!("{error:?}")
}
