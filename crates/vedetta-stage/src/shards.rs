//! Shares the shards of one entity type among the processes that work on it.
//!
//! ```text
//! {prefix}members/{name}     who is there        ┐ each under the lease of the process:
//! {prefix}shards/{number}    whose shard it is   ┘ they go when it no longer says that it lives
//! ```
//!
//! A shard has one owner, the maker of its key. A process says which shards are its own only while its
//! lease is beyond doubt: if it is not confirmed for two thirds of its time, nothing is, which is before
//! anybody else can have them. All of this runs on a thread of its own, so that no stage that blocks can
//! keep it from being in time.
//!
//! It is there to spread the work. That nothing is lost or saved twice is up to the claims and versions
//! of the records: a process that was stopped in its tracks may believe in its shards for a moment.

mod share;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt as _;
use futures_util::future::{BoxFuture, OptionFuture, join_all};
use tokio::sync::{oneshot, watch};
use tokio::time::{Instant, sleep, sleep_until, timeout};
use vedetta_core::follow::{Step, Turn};
use vedetta_core::{
    Backoff, Changes, Entry, Feed as _, Follow, KeyRange, Moment, Page, Registry, Revision,
    SourceError, explain,
};

use crate::record::StageError;
use share::Moves;

/// Below the prefix: who is there, and whose shard it is.
const MEMBERS: &str = "members/";
const SHARDS: &str = "shards/";
/// Stores count leases in seconds.
const SHORTEST: Duration = Duration::from_secs(1);
/// A lease is renewed so many times in its life; it is beyond doubt for four such beats.
const BEATS: u32 = 6;
const SURE_BEATS: u32 = 4;
/// What did not work is tried again after a beat, or this if it is shorter.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// Shards taken and let go at once.
const AT_ONCE: usize = 32;
/// The waits before following the store again.
const RECONNECT: Backoff =
    Backoff { first: Duration::from_millis(100), most: Duration::from_secs(2), jitter: 0.5 };

/// This process's share of the shards. Dropped, it owns none at once, and others get them when its lease
/// is over.
#[derive(Debug)]
pub struct Shards {
    count: u16,
    owned: watch::Receiver<Arc<[u16]>>,
    leave: oneshot::Sender<()>,
    ended: oneshot::Receiver<()>,
}

impl Shards {
    /// Joins those that share `count` shards under `prefix`; all must say the same count, and each has a
    /// name of its own. One that starts again under its name waits until its former lease is over.
    ///
    /// A process that dies hands its shards over after `ttl`, a second at least. One that cannot reach
    /// the store owns nothing after two thirds of that, so it should be several times what a call may
    /// take. Fails only when there can be no thread.
    pub fn join<R: Registry>(
        registry: R,
        prefix: impl Into<String>,
        name: impl Into<String>,
        count: u16,
        ttl: Duration,
    ) -> io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let (owned, receiver) = watch::channel(Arc::default());
        let (leave, asked_to_leave) = oneshot::channel();
        let (running, ended) = oneshot::channel();
        let (prefix, name) = (prefix.into(), name.into());
        let follow = Follow::new(KeyRange::prefix(prefix.clone()), RECONNECT);
        let task = Task {
            registry: Arc::new(registry),
            prefix,
            ttl: ttl.max(SHORTEST),
            owned: Owned(owned),
            term: None,
            picture: Picture::new(name, count),
            began: Instant::now(),
            follow,
            feed: None,
            listing: Vec::new(),
            rest_until: None,
        };
        let work = move || {
            runtime.block_on(task.run(asked_to_leave));
            drop(running);
        };
        thread::Builder::new().name("vedetta-shards".into()).spawn(work)?;
        Ok(Self { count, owned: receiver, leave, ended })
    }

    /// The shards that are ours now, in order, and how that changes.
    pub fn owned(&self) -> watch::Receiver<Arc<[u16]>> {
        self.owned.clone()
    }

    /// Gives all back: returns when others can have them, at the latest when the lease is over.
    pub async fn leave(self) {
        let _ = self.leave.send(());
        let _ = self.ended.await; // always an error: nothing is ever sent
    }
}

/// Which shards a [`Processor`](crate::Processor) works on, as it changes.
#[derive(Debug, Clone)]
pub struct Share {
    /// Of so many, as far as is known.
    count: Option<u16>,
    pub(crate) owned: watch::Receiver<Arc<[u16]>>,
}

impl From<&Shards> for Share {
    fn from(shards: &Shards) -> Self {
        Self { count: Some(shards.count), owned: shards.owned() }
    }
}

/// That all shards are somebody's is up to who says this.
impl From<watch::Receiver<Arc<[u16]>>> for Share {
    fn from(owned: watch::Receiver<Arc<[u16]>>) -> Self {
        Self { count: None, owned }
    }
}

impl Share {
    /// Whether it is one of so many shards: otherwise some would be nobody's, or there would be none such.
    pub(crate) fn fits(&self, divided: u16) -> Result<(), StageError> {
        let last = self.owned.borrow().iter().max().map_or(0, |last| last.saturating_add(1));
        let shared = self.count.unwrap_or(divided).max(last);
        if shared == divided { Ok(()) } else { Err(StageError::Unshared { shared, divided }) }
    }
}

/// Says what is ours. Nothing is once nobody looks after it.
struct Owned(watch::Sender<Arc<[u16]>>);

impl Owned {
    fn tell(&self, shards: impl Iterator<Item = u16>) {
        let shards: Arc<[u16]> = shards.collect();
        self.0.send_if_modified(|told| {
            let differs = *told != shards;
            *told = shards;
            differs
        });
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        self.tell(std::iter::empty());
    }
}

/// What lasts as long as a lease.
struct Term<L> {
    lease: L,
    /// Until then nobody else can have what is held.
    sure_until: Instant,
    /// Whether the others know of us.
    member: bool,
    held: BTreeSet<u16>,
    /// Let go of, but we have not heard yet that they are gone. A call that was given up may still come
    /// through, so until then they must not be held again.
    leaving: BTreeSet<u16>,
}

/// What the store says, each part as of its own revision: what we did ourselves we know before we hear
/// of it.
struct Picture {
    me: String,
    members: BTreeMap<String, Revision>,
    owners: Vec<(Revision, Option<String>)>,
    listed: bool,
}

impl Picture {
    fn new(me: String, count: u16) -> Self {
        let owners = vec![(Revision::default(), None); count.into()];
        Self { me, members: BTreeMap::new(), owners, listed: false }
    }

    fn member(&mut self, name: &str, revision: Revision, there: bool) {
        if self.members.get(name).is_some_and(|known| *known > revision) {
            return;
        }
        if there {
            self.members.insert(name.to_owned(), revision);
        } else {
            self.members.remove(name);
        }
    }

    fn owner(&mut self, shard: u16, revision: Revision, owner: Option<&str>) {
        if let Some(known) = self.owners.get_mut(usize::from(shard))
            && known.0 <= revision
        {
            *known = (revision, owner.map(str::to_owned));
        }
    }

    /// When it was made ours, if it is.
    fn mine(&self, shard: u16) -> Option<Revision> {
        let (revision, owner) = self.owners.get(usize::from(shard))?;
        (owner.as_ref() == Some(&self.me)).then_some(*revision)
    }

    fn key(&mut self, key: &[u8], value: Option<&[u8]>, revision: Revision) {
        let Ok(key) = std::str::from_utf8(key) else { return };
        if let Some(name) = key.strip_prefix(MEMBERS) {
            self.member(name, revision, value.is_some());
        } else if let Some(shard) = key.strip_prefix(SHARDS).and_then(|shard| shard.parse().ok()) {
            let owner = value.map(String::from_utf8_lossy);
            self.owner(shard, revision, owner.as_deref());
        }
    }

    /// All there is, as of a revision.
    fn list(&mut self, entries: &[Entry], prefix: usize, revision: Revision) {
        self.members.retain(|_, known| *known > revision);
        for (_, owner) in self.owners.iter_mut().filter(|(known, _)| *known <= revision) {
            *owner = None;
        }
        for entry in entries {
            self.key(&entry.key[prefix..], Some(&entry.value), entry.modified);
        }
        self.listed = true;
    }

    fn moves(&self, held: &BTreeSet<u16>) -> Moves {
        let owners: Vec<_> = self.owners.iter().map(|(_, owner)| owner.as_deref()).collect();
        share::moves(&self.me, self.members.keys().map(String::as_str), &owners, held)
    }
}

/// What came of renewing the lease or beginning one, and when that was asked for.
enum Beat<L> {
    Begun(Instant, Result<L, SourceError>),
    Renewed(Instant, Result<bool, SourceError>),
}

/// What came of a step towards the store.
enum Heard<F> {
    Page(Result<Page, SourceError>),
    Opened(Result<(F, Revision), SourceError>),
    Read(F, Result<Changes, SourceError>),
    Waited,
}

/// What we do in the store.
#[derive(Debug, Clone, Copy)]
enum Act {
    Announce,
    Take(u16),
    /// The one that was made at this revision.
    LetGo(u16, Revision),
}

type Done = (Act, Result<Option<Revision>, SourceError>);

/// Owns all of it. Three things go on beside each other, and none waits for another: the lease is kept,
/// the store is followed, and shards are taken and let go.
struct Task<R: Registry> {
    registry: Arc<R>,
    prefix: String,
    ttl: Duration,
    owned: Owned,
    term: Option<Term<R::Lease>>,
    picture: Picture,
    /// When the clock of `follow` began.
    began: Instant,
    follow: Follow,
    feed: Option<R::Feed>,
    listing: Vec<Entry>,
    /// Something did not work: until then, or until we hear something new, it is not tried again.
    rest_until: Option<Instant>,
}

impl<R: Registry> Task<R> {
    async fn run(mut self, mut leave: oneshot::Receiver<()>) {
        let mut beat = self.beat(Instant::now());
        let mut link = self.link();
        let mut acts: Option<BoxFuture<'static, Vec<Done>>> = None;
        let leaves = loop {
            if acts.is_none() {
                acts = self.act();
            }
            self.tell(); // what is to be let go is not ours before it is
            let sure_until = self.sure_until();
            tokio::select! {
                biased;
                asked = &mut leave => break asked.is_ok(),
                () = until(sure_until) => {
                    tracing::warn!(me = self.picture.me, "the lease is in doubt: no shard is ours");
                }
                came = &mut beat => {
                    let joined = self.term.is_some();
                    let next = self.beaten(came);
                    if joined && self.term.is_none() {
                        (acts, link) = (None, self.link());
                    }
                    beat = self.beat(next);
                }
                Some(done) = OptionFuture::from(acts.as_mut()) => {
                    acts = None;
                    self.done(done);
                }
                heard = &mut link => {
                    if self.heard(heard) {
                        acts = None;
                        beat = self.beat(Instant::now());
                    }
                    link = self.link();
                }
                () = until(self.rest_until) => self.rest_until = None,
            }
        };
        drop((beat, link, acts));
        self.owned.tell(std::iter::empty());
        if leaves && let Some(term) = &self.term {
            let end = async {
                while let Err(error) = self.registry.end(&term.lease).await {
                    tracing::debug!(error = explain(&error), "cannot give the shards back yet");
                    sleep(self.pause()).await;
                }
            };
            let _ = timeout(self.ttl, end).await; // by then it is over anyway
        }
    }

    /// When the shards we said to be ours no longer are, if there are any.
    fn sure_until(&self) -> Option<Instant> {
        let told = !self.owned.0.borrow().is_empty();
        self.term.as_ref().filter(|_| told).map(|term| term.sure_until)
    }

    fn tell(&self) {
        let sure = |term: &&Term<R::Lease>| Instant::now() < term.sure_until;
        let held = self.term.as_ref().filter(sure).into_iter().flat_map(|term| &term.held);
        self.owned.tell(held.copied());
    }

    fn pause(&self) -> Duration {
        (self.ttl / BEATS).min(LONGEST_PAUSE)
    }

    /// Renews the lease when it is time, or begins one.
    fn beat(&self, at: Instant) -> BoxFuture<'static, Beat<R::Lease>> {
        let (registry, ttl) = (Arc::clone(&self.registry), self.ttl);
        let lease = self.term.as_ref().map(|term| term.lease.clone());
        Box::pin(async move {
            sleep_until(at).await;
            let asked = Instant::now();
            match lease {
                Some(lease) => Beat::Renewed(asked, registry.renew(&lease).await),
                None => Beat::Begun(asked, registry.begin(ttl).await),
            }
        })
    }

    /// Takes in what came of a beat. When the next is due.
    fn beaten(&mut self, beat: Beat<R::Lease>) -> Instant {
        let every = self.ttl / BEATS;
        // It may have been granted at once, so it counts from when it was asked for.
        let sure = every * SURE_BEATS;
        match beat {
            Beat::Begun(asked, Ok(lease)) => {
                let (held, leaving) = (BTreeSet::new(), BTreeSet::new());
                let sure_until = asked + sure;
                self.term = Some(Term { lease, sure_until, member: false, held, leaving });
                asked + every
            }
            Beat::Renewed(asked, Ok(true)) => {
                if let Some(term) = &mut self.term {
                    term.sure_until = asked + sure;
                }
                asked + every
            }
            Beat::Renewed(_, Ok(false)) => {
                tracing::warn!(me = self.picture.me, "the lease is over: joining again");
                // Perhaps the store is another one, whose revisions say nothing about what we know.
                self.begin_anew();
                self.follow.restart();
                Instant::now()
            }
            Beat::Begun(asked, Err(error)) | Beat::Renewed(asked, Err(error)) => {
                let why = explain(&error);
                tracing::debug!(me = self.picture.me, error = why, "the lease is not confirmed");
                asked + self.pause()
            }
        }
    }

    /// Begins what is to be done next, if there is something.
    fn act(&mut self) -> Option<BoxFuture<'static, Vec<Done>>> {
        let term = self.term.as_mut()?;
        if !self.picture.listed || self.rest_until.is_some() {
            return None;
        }
        let acts: Vec<Act> = if term.member {
            let Moves { let_go, take } = self.picture.moves(&term.held);
            term.leaving.extend(let_go);
            term.held.retain(|shard| !term.leaving.contains(shard));
            let made = |shard: &u16| Some(Act::LetGo(*shard, self.picture.mine(*shard)?));
            let let_go = term.leaving.iter().filter_map(made);
            let take = take.into_iter().filter(|shard| !term.leaving.contains(shard));
            let_go.chain(take.map(Act::Take)).take(AT_ONCE).collect()
        } else {
            vec![Act::Announce]
        };
        if acts.is_empty() {
            return None;
        }
        let (registry, lease) = (Arc::clone(&self.registry), term.lease.clone());
        let (prefix, me) = (self.prefix.clone(), self.picture.me.clone());
        Some(Box::pin(async move {
            let shard = |shard: u16| Bytes::from(format!("{prefix}{SHARDS}{shard}"));
            let act = async |act: Act| match act {
                Act::Announce => {
                    let key = format!("{prefix}{MEMBERS}{me}").into();
                    registry.hold(&lease, key, Bytes::new()).await
                }
                Act::Take(number) => registry.hold(&lease, shard(number), me.clone().into()).await,
                Act::LetGo(number, made) => registry.let_go(shard(number), made).await,
            };
            let done = join_all(acts.iter().map(|one| act(*one))).await;
            acts.into_iter().zip(done).collect()
        }))
    }

    fn done(&mut self, done: Vec<Done>) {
        let Some(term) = &mut self.term else { return };
        let mut failed = false;
        for (act, done) in done {
            let Ok(Some(revision)) = done else {
                if let Err(error) = done {
                    tracing::debug!(?act, error = explain(&error), "the shards stay as they are");
                }
                failed = true;
                continue;
            };
            match act {
                Act::Announce => {
                    self.picture.member(&self.picture.me.clone(), revision, true);
                    term.member = true;
                }
                Act::Take(shard) => {
                    let me = self.picture.me.clone();
                    self.picture.owner(shard, revision, Some(&me));
                    term.held.insert(shard);
                }
                Act::LetGo(shard, _) => self.picture.owner(shard, revision, None),
            }
        }
        if failed {
            self.rest_until = Some(Instant::now() + self.pause());
        }
        self.compare();
    }

    /// We hold nothing that the store says is not ours.
    fn compare(&mut self) {
        if let Some(term) = &mut self.term {
            term.member &= self.picture.members.contains_key(&self.picture.me);
            term.held.retain(|shard| self.picture.mine(*shard).is_some());
            term.leaving.retain(|shard| self.picture.mine(*shard).is_some());
        }
    }

    /// Nothing is known, and nothing is ours.
    fn begin_anew(&mut self) {
        let count = self.picture.owners.len().try_into().unwrap_or(u16::MAX);
        self.picture = Picture::new(std::mem::take(&mut self.picture.me), count);
        (self.term, self.rest_until) = (None, None);
        self.listing.clear();
    }

    fn now(&self) -> Moment {
        Moment::reached(self.began.elapsed())
    }

    /// The next step towards the store.
    fn link(&mut self) -> BoxFuture<'static, Heard<R::Feed>> {
        let registry = Arc::clone(&self.registry);
        match (self.follow.step(), self.feed.take()) {
            (Step::List(range, at), _) => {
                async move { Heard::Page(registry.list(range, at).await) }.boxed()
            }
            (Step::Open(from), _) => {
                let range = KeyRange::prefix(self.prefix.clone());
                async move { Heard::Opened(registry.follow(range, from).await) }.boxed()
            }
            (Step::Read, Some(mut feed)) => async move {
                let read = feed.next().await;
                Heard::Read(feed, read)
            }
            .boxed(),
            (Step::Wait(until), _) => {
                let wait = until.since(self.now());
                async move {
                    sleep(wait).await;
                    Heard::Waited
                }
                .boxed()
            }
            (Step::Read, None) => std::future::pending().boxed(),
        }
    }

    /// Takes in what came of a step. Whether the store is not the one it was, and our lease nothing.
    fn heard(&mut self, heard: Heard<R::Feed>) -> bool {
        let (now, chance) = (self.now(), fastrand::f64());
        let turn = match heard {
            Heard::Waited => {
                self.follow.waited();
                Turn::Going
            }
            Heard::Page(Ok(page)) => {
                let last = page.entries.last().filter(|_| page.more).map(|entry| entry.key.clone());
                self.listing.extend(page.entries);
                self.follow.page(page.revision, last.as_deref())
            }
            Heard::Opened(Ok((feed, revision))) => {
                let another = revision < self.follow.seen();
                let turn = self.follow.opened(revision, feed.owed(), now, chance);
                if another {
                    tracing::warn!(me = self.picture.me, "another store: joining again");
                    self.begin_anew();
                    return true;
                }
                self.feed = Some(feed);
                turn
            }
            Heard::Read(feed, Ok(changes)) => {
                self.feed = Some(feed);
                self.follow.read(changes.revision);
                for change in &changes.changes {
                    let key = &change.key[self.prefix.len()..];
                    self.picture.key(key, change.value.as_deref(), change.revision);
                    self.rest_until = None;
                }
                self.compare();
                Turn::Going
            }
            Heard::Page(Err(error)) | Heard::Opened(Err(error)) | Heard::Read(_, Err(error)) => {
                tracing::debug!(error = explain(&error), "lost the store, trying again");
                match error {
                    SourceError::Compacted { .. } => self.follow.compacted(now, chance),
                    _ => self.follow.lost(now, chance),
                }
            }
        };
        match turn {
            Turn::Going | Turn::CatchingUp | Turn::Open => {}
            Turn::Again => self.listing.clear(),
            Turn::Listed(revision) => {
                let listing = std::mem::take(&mut self.listing);
                self.picture.list(&listing, self.prefix.len(), revision);
                self.rest_until = None;
                self.compare();
            }
        }
        false
    }
}

/// Never, if there is no such time.
async fn until(at: Option<Instant>) {
    match at {
        Some(at) => sleep_until(at).await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COUNT: u16 = 16;

    /// A store, and its history.
    #[derive(Default)]
    struct World {
        now: BTreeMap<String, (Revision, String)>,
        log: Vec<(String, Option<String>)>,
    }

    impl World {
        fn revision(&self) -> Revision {
            Revision(self.log.len() as u64)
        }

        fn write(&mut self, key: &str, value: Option<&str>) -> Revision {
            self.log.push((key.to_owned(), value.map(str::to_owned)));
            match value {
                Some(value) => self.now.insert(key.to_owned(), (self.revision(), value.to_owned())),
                None => self.now.remove(key),
            };
            self.revision()
        }
    }

    /// One that hears of the world late, and knows what it did itself.
    struct Member {
        picture: Picture,
        heard: usize,
        held: BTreeSet<u16>,
    }

    impl Member {
        fn joins(world: &mut World, name: &str) -> Self {
            let mut picture = Picture::new(name.to_owned(), COUNT);
            let listing: Vec<_> = world.now.iter().collect();
            let entry = |(key, (modified, value)): (&String, &(Revision, String))| Entry {
                key: key.clone().into(),
                value: value.clone().into(),
                modified: *modified,
            };
            let listing: Vec<_> = listing.into_iter().map(entry).collect();
            picture.list(&listing, 0, world.revision());
            let heard = world.log.len();
            let revision = world.write(&format!("{MEMBERS}{name}"), Some(""));
            picture.member(name, revision, true);
            Self { picture, heard, held: BTreeSet::new() }
        }

        fn leaves(self, world: &mut World) {
            for shard in &self.held {
                world.write(&format!("{SHARDS}{shard}"), None);
            }
            world.write(&format!("{MEMBERS}{}", self.picture.me), None);
        }

        fn hears(&mut self, world: &World, most: usize) {
            for (key, value) in world.log.iter().skip(self.heard).take(most) {
                self.heard += 1;
                let value = value.as_ref().map(String::as_bytes);
                self.picture.key(key.as_bytes(), value, Revision(self.heard as u64));
            }
        }

        /// Does so much of what it is to do. Whether there was something.
        fn acts(&mut self, world: &mut World, most: usize) -> bool {
            let Moves { let_go, take } = self.picture.moves(&self.held);
            for shard in let_go.iter().take(most) {
                let revision = world.write(&format!("{SHARDS}{shard}"), None);
                self.held.remove(shard);
                self.picture.owner(*shard, revision, None);
            }
            for shard in take.iter().take(most) {
                let key = format!("{SHARDS}{shard}");
                if !world.now.contains_key(&key) {
                    let me = self.picture.me.clone();
                    let revision = world.write(&key, Some(&me));
                    self.held.insert(*shard);
                    self.picture.owner(*shard, revision, Some(&me));
                }
            }
            !let_go.is_empty() || !take.is_empty()
        }
    }

    #[test]
    fn however_late_they_hear_of_each_other_members_come_to_fair_shares_and_rest() {
        for seed in 0..2_000 {
            let mut chance = fastrand::Rng::with_seed(seed);
            let mut world = World::default();
            let mut members = vec![Member::joins(&mut world, "m0")];
            for step in 1..chance.usize(1..200) {
                let at = chance.usize(..members.len());
                match chance.u8(..20) {
                    0 if members.len() < 6 => {
                        members.push(Member::joins(&mut world, &format!("m{step}")));
                    }
                    1 if members.len() > 1 => members.swap_remove(at).leaves(&mut world),
                    2..12 => members[at].hears(&world, chance.usize(..9)),
                    _ => drop(members[at].acts(&mut world, chance.usize(..5))),
                }
            }
            // Nobody comes or goes any more. Each round all hear everything, and then act as one.
            let mut rounds = 0;
            while {
                members.iter_mut().for_each(|member| member.hears(&world, usize::MAX));
                members.iter_mut().filter_map(|m| m.acts(&mut world, 99).then_some(())).count() > 0
            } {
                rounds += 1;
                assert!(rounds <= 4, "seed {seed}: no rest");
            }
            let shares: Vec<_> = members.iter().map(|member| member.held.len()).collect();
            let (least, most) = (shares.iter().min().unwrap(), shares.iter().max().unwrap());
            assert_eq!(shares.iter().sum::<usize>(), usize::from(COUNT), "seed {seed}: {shares:?}");
            assert!(most - least <= 1, "seed {seed}: {shares:?}");
        }
    }

    #[test]
    fn what_we_did_ourselves_is_not_undone_by_older_news() {
        let mut picture = Picture::new("me".into(), 2);
        let told = |picture: &Picture| {
            let owners =
                picture.owners.iter().map(|(_, owner)| owner.clone().unwrap_or("-".into()));
            format!("{} {:?}", owners.collect::<String>(), picture.members.keys())
        };
        picture.list(&[], 0, Revision(5));
        picture.owner(0, Revision(9), Some("me"));
        picture.member("me", Revision(8), true);
        for (key, value, revision) in [
            ("shards/0", Some("x"), 6),
            ("shards/0", None, 7),
            ("members/me", None, 7), // an earlier life of ours
        ] {
            picture.key(key.as_bytes(), value.map(str::as_bytes), Revision(revision));
            assert_eq!(told(&picture), r#"me- ["me"]"#, "{key} at {revision}");
        }
        picture.list(&[], 0, Revision(7));
        assert_eq!(told(&picture), r#"me- ["me"]"#, "an older list");
        picture.key(b"shards/0", None, Revision(10));
        picture.key(b"members/me", None, Revision(10));
        assert_eq!(told(&picture), "-- []");
        for key in ["shards/2", "shards/x", "shards/", "other", ""] {
            picture.key(key.as_bytes(), Some(b"x"), Revision(11));
            assert_eq!(told(&picture), "-- []", "{key} is nothing of ours");
        }
    }
}
