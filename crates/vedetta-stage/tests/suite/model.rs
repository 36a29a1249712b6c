//! Random calls of the queues, whose every answer a small model agrees with.
//!
//! The model does not know the database's clock, only that a call happened between two moments; so its times
//! are spans, and where a span leaves an answer open, it takes the one that was given.
//!
//! `STAGE_SEED` for one seed, `STAGE_SEEDS` for so many: a failure names its own.

use std::collections::{BTreeMap, HashSet};
use std::time::{Duration, Instant};

use fastrand::Rng;
use vedetta_core::queue::{Kept, Settled};
use vedetta_stage::{Claim, Fate, Record, Records, Which};

use super::{Ask, HOUR, Seed, World, seeds};

const CALLS: usize = 40;
const IDS: [&str; 5] = ["a", "b", "c", "d", "e"];

/// Microseconds between which something happened, or will.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Span {
    from: i64,
    to: i64,
}

/// Clocks may count in milliseconds, and round delays up to them.
const COARSE: i64 = 2_000;

impl Span {
    const NEVER: Self = Self { from: i64::MIN, to: i64::MIN };

    fn after(self, delay: Duration) -> Self {
        let delay = i64::try_from(delay.as_micros()).unwrap();
        Self { from: self.from + delay, to: self.to + delay + COARSE }
    }

    fn earlier(self, other: Self) -> Self {
        Self { from: self.from.min(other.from), to: self.to.min(other.to) }
    }

    fn later(self, other: Self) -> Self {
        Self { from: self.from.max(other.from), to: self.to.max(other.to) }
    }

    /// Whether it has come by `now`; nothing if that is open.
    fn is_over(self, now: Self) -> Option<bool> {
        if self.to <= now.from {
            Some(true)
        } else if self.from > now.to {
            Some(false)
        } else {
            None
        }
    }

    /// Whether a wait from `now` until then may be that long.
    fn is_in(self, now: Self, wait: Duration) -> bool {
        let wait = i64::try_from(wait.as_micros()).unwrap_or(i64::MAX);
        let least = self.from.saturating_sub(now.to).max(0);
        let most = self.to.saturating_sub(now.from).max(0);
        (least.saturating_sub(COARSE)..=most.saturating_add(COARSE)).contains(&wait)
    }
}

#[derive(Debug, Clone, Copy)]
enum Standing {
    Free,
    Held { token: i64, until: Span, is_written: bool },
    Parked,
}

/// What the model has of a record.
#[derive(Debug)]
struct Known {
    shard: u16,
    visit: Span,
    not_before: Span,
    failures: u32,
    error: Option<String>,
    standing: Standing,
}

impl Known {
    /// When it may be claimed.
    fn due(&self) -> Option<Span> {
        match self.standing {
            Standing::Free => Some(self.visit),
            Standing::Held { until, .. } => Some(until),
            Standing::Parked => None,
        }
    }

    fn is_due(&self, now: Span) -> Option<bool> {
        self.due().map_or(Some(false), |due| due.is_over(now))
    }

    fn is_held(&self, now: Span) -> Option<bool> {
        match self.standing {
            Standing::Held { until, .. } => until.is_over(now).map(|over| !over),
            _ => Some(false),
        }
    }

    /// Whether this token still holds it; nothing if that is open.
    fn is_held_by(&self, claim: &Claim, now: Span) -> Option<bool> {
        match self.standing {
            Standing::Held { token, .. } if token == claim.token => self.is_held(now),
            _ => Some(false),
        }
    }

    /// It turned out that its lease was over by `now`.
    fn lapsed(&mut self, now: Span) {
        if let Standing::Held { until, .. } = &mut self.standing {
            until.to = until.to.min(now.to);
        }
    }

    fn written(&mut self) {
        if let Standing::Held { is_written, .. } = &mut self.standing {
            *is_written = true;
        }
    }

    fn is_well(&mut self) {
        (self.failures, self.error, self.not_before) = (0, None, Span::NEVER);
    }
}

#[derive(Debug, Default)]
struct Model {
    records: BTreeMap<String, Known>,
    tokens: HashSet<i64>,
}

impl Model {
    fn enqueue(&mut self, now: Span, id: &str, shard: u16, delay: Duration) {
        let wish = now.after(delay);
        let Some(known) = self.records.get_mut(id) else {
            let known = Known {
                shard,
                visit: wish,
                not_before: Span::NEVER,
                failures: 0,
                error: None,
                standing: Standing::Free,
            };
            self.records.insert(id.to_owned(), known);
            return;
        };
        if let Standing::Parked = known.standing {
            (known.visit, known.standing) = (wish, Standing::Free);
            (known.failures, known.error) = (0, None);
        }
        known.visit = known.visit.earlier(wish).later(known.not_before);
        known.written();
    }

    fn claimed(
        &mut self,
        now: Span,
        shards: &[u16],
        (room, lease): (u32, Duration),
        (claims, rest): (&[Claim], Option<Duration>),
    ) {
        assert!(claims.len() <= room as usize, "more than asked for");
        let ids: HashSet<&str> = claims.iter().map(|claim| &*claim.id).collect();
        assert_eq!(ids.len(), claims.len(), "one of them twice");
        let ours = |known: &Known| shards.contains(&known.shard);
        for claim in claims {
            assert!(self.tokens.insert(claim.token), "a token twice");
            let known = self.records.get(&*claim.id).expect("there is such a record");
            assert!(ours(known), "{claim:?} is of another shard");
            assert_ne!(known.is_due(now), Some(false), "{claim:?} is not due: {known:?}");
            assert_eq!(claim.failures, known.failures);
        }
        // Between shards there is no order, and they may share little room: then the rest is at once.
        let is_full = claims.len() == room as usize;
        for (id, known) in
            self.records.iter().filter(|(id, known)| ours(known) && !ids.contains(&***id))
        {
            if known.is_due(now) != Some(true) {
                continue;
            }
            assert!(is_full || shards.len() > 1, "{id} is left");
            let due = known.due().expect("it is due");
            let later = |claim: &&Claim| {
                let other = &self.records[&*claim.id];
                shards.len() == 1 && other.due().is_some_and(|other| other.from > due.to)
            };
            assert!(!claims.iter().any(|claim| later(&claim)), "{id} was due before");
        }
        for claim in claims {
            let known = self.records.get_mut(&*claim.id).expect("there is such a record");
            let (token, until) = (claim.token, now.after(lease));
            known.standing = Standing::Held { token, until, is_written: false };
        }
        let Some(rest) = rest else {
            return assert!(is_full, "there may be more only if it is full");
        };
        assert!(!is_full);
        match self
            .records
            .values()
            .filter(|known| ours(known))
            .filter_map(Known::due)
            .reduce(Span::earlier)
        {
            Some(next) => assert!(next.is_in(now, rest), "{rest:?} until {next:?} from {now:?}"),
            None => assert!(rest > 1_000 * HOUR, "there is nothing: {rest:?}"),
        }
    }

    fn kept(&mut self, now: Span, claim: &Claim, lease: Duration, answer: Kept) {
        let Some(known) = self.records.get_mut(&*claim.id) else {
            return assert_eq!(answer, Kept::Lost);
        };
        let is_held = known.is_held_by(claim, now).unwrap_or(answer == Kept::Ours);
        assert_eq!(answer == Kept::Ours, is_held, "{claim:?} {known:?}");
        match &mut known.standing {
            Standing::Held { until, .. } if is_held => *until = now.after(lease),
            Standing::Held { token, .. } if *token == claim.token => known.lapsed(now),
            _ => {}
        }
    }

    fn settled(&mut self, now: Span, claim: &Claim, fate: &Fate, answer: Settled) {
        let Some(known) = self.records.get_mut(&*claim.id) else {
            return assert_eq!(answer, Settled::Stale, "{claim:?}");
        };
        let is_held = known.is_held_by(claim, now).unwrap_or(answer != Settled::Stale);
        assert_eq!(answer != Settled::Stale, is_held, "{claim:?} {known:?}");
        let Standing::Held { token, is_written, .. } = known.standing else { return };
        if !is_held {
            if token == claim.token {
                known.lapsed(now);
            }
            return;
        }
        known.standing = Standing::Free;
        match fate {
            Fate::Gone if !is_written => {
                self.records.remove(&*claim.id);
                return assert_eq!(answer, Settled::Gone);
            }
            Fate::Gone => known.is_well(),
            Fate::Visit(after) => {
                known.is_well();
                if !is_written {
                    known.visit = now.after(*after);
                }
            }
            Fate::Failed { after, not_before, error, park } => {
                known.failures += 1;
                known.error = Some(error.clone());
                known.not_before = now.after(*not_before);
                known.visit = if is_written { known.not_before } else { now.after(*after) };
                if *park && !is_written {
                    known.standing = Standing::Parked;
                    return assert_eq!(answer, Settled::Parked);
                }
            }
            Fate::Released => {}
        }
        let Settled::Again(wait) = answer else { panic!("{answer:?} of {fate:?}") };
        assert!(known.visit.is_in(now, wait), "{wait:?} until {:?} from {now:?}", known.visit);
    }

    fn retried(&mut self, now: Span, id: &str, answer: bool) {
        let Some(known) = self.records.get_mut(id) else { return assert!(!answer) };
        assert!(answer);
        (known.failures, known.error, known.visit) = (0, None, now);
        known.not_before = Span::NEVER;
        known.written();
        if let Standing::Parked = known.standing {
            known.standing = Standing::Free;
        }
    }

    fn listed(&self, now: Span, listed: &[Record]) {
        let ids: Vec<&str> = listed.iter().map(|record| &*record.id).collect();
        assert_eq!(ids, self.records.keys().collect::<Vec<_>>());
        for (record, known) in listed.iter().zip(self.records.values()) {
            assert_eq!((record.failures, &record.error), (known.failures, &known.error));
            assert_eq!(record.is_parked, matches!(known.standing, Standing::Parked));
            assert_eq!(record.is_held, known.is_held(now).unwrap_or(record.is_held));
            match (known.due(), record.due_in) {
                (Some(due), Some(wait)) => {
                    assert!(!record.is_held && due.is_in(now, wait), "{record:?} {known:?}");
                }
                (_, None) => {
                    let waits = known.is_due(now) == Some(false) && !record.is_held;
                    assert!(!waits || record.is_parked, "{record:?} {known:?}");
                }
                (None, Some(_)) => panic!("{record:?} {known:?}"),
            }
        }
    }

    fn counted(&self, now: Span, counts: &vedetta_stage::LaneCounts) {
        let count = |is_so: &dyn Fn(&Known) -> bool| {
            self.records.values().filter(|known| is_so(known)).count() as u64
        };
        let is_parked = |known: &Known| matches!(known.standing, Standing::Parked);
        assert_eq!(counts.records, self.records.len() as u64);
        assert_eq!(counts.parked, count(&is_parked));
        assert_eq!(counts.failing, count(&|known| known.failures > 0 && !is_parked(known)));
        for (counted, is_so) in [
            (counts.due, Known::is_due as fn(&Known, Span) -> Option<bool>),
            (counts.held, Known::is_held),
        ] {
            let surely = count(&|known| is_so(known, now) == Some(true));
            let maybe = count(&|known| is_so(known, now) != Some(false));
            assert!((surely..=maybe).contains(&counted), "{counts:?} {self:?}");
        }
        assert_eq!(counts.oldest_due.is_some(), counts.due > 0);
    }
}

/// Calls the queues at random.
struct Caller<'w, W: World> {
    world: &'w W,
    entity: String,
    rng: Rng,
    began: Instant,
    claims: Vec<Claim>,
    model: Model,
}

impl<W: World> Caller<'_, W> {
    fn now(&self) -> i64 {
        i64::try_from(self.began.elapsed().as_micros()).unwrap()
    }

    fn since(&self, from: i64) -> Span {
        Span { from: from - 10, to: self.now() + COARSE }
    }

    fn pick<T: Copy>(&mut self, some: &[T]) -> T {
        *self.rng.choice(some).expect("some")
    }

    fn delay(&mut self) -> Duration {
        let millis = Duration::from_millis;
        self.pick(&[millis(0), millis(0), millis(1), millis(3), HOUR, 2 * HOUR])
    }

    /// Claims of now and before, each once.
    fn some_claims(&mut self) -> Vec<Claim> {
        let count = self.rng.usize(..=self.claims.len().min(4));
        let recent = self.claims.len().saturating_sub(8);
        let mut some = self.claims[recent..].to_vec();
        self.rng.shuffle(&mut some);
        some.truncate(count);
        some
    }

    fn fate(&mut self) -> Fate {
        match self.rng.u8(..6) {
            0 | 1 => Fate::Gone,
            2 => Fate::Visit(self.delay()),
            3 => Fate::Released,
            _ => Fate::Failed {
                after: self.delay(),
                not_before: self.pick(&[Duration::ZERO, Duration::from_millis(2), HOUR / 2]),
                error: format!("error {}", self.rng.u16(..)),
                park: self.rng.u8(..3) == 0,
            },
        }
    }

    async fn call(&mut self) {
        let records = self.world.records();
        let lane = records.lane(&self.entity, "stage").await.unwrap();
        let call = self.rng.u8(..20);
        let from = self.now();
        match call {
            0..5 => {
                let count = self.rng.usize(1..4);
                let visits: Vec<_> = (0..count)
                    .map(|_| {
                        let n = self.rng.usize(..IDS.len());
                        (IDS[n], u16::from(n > 2), self.delay())
                    })
                    .collect();
                records.enqueue(lane, &visits).await.unwrap();
                let now = self.since(from);
                for (id, shard, delay) in visits {
                    self.model.enqueue(now, id, shard, delay);
                }
            }
            5..10 => {
                let shards = self.pick(&[&[0][..], &[1], &[0], &[1], &[0, 1]]);
                let room = self.rng.u32(1..4);
                let lease =
                    self.pick(&[Duration::from_millis(1), Duration::from_millis(4), HOUR, HOUR]);
                let claimed = records.claim(lane, shards, room, lease).await.unwrap();
                let (now, answer) = (self.since(from), (&*claimed.claims, claimed.rest));
                self.model.claimed(now, shards, (room, lease), answer);
                self.claims.extend(claimed.claims);
            }
            10..12 => {
                let some = self.some_claims();
                let lease = self.pick(&[Duration::from_millis(1), HOUR]);
                let held: Vec<&Claim> = some.iter().collect();
                let kept = records.keep(lane, &held, lease).await.unwrap();
                assert_eq!(kept.len(), some.len());
                let now = self.since(from);
                for (claim, kept) in some.iter().zip(kept) {
                    self.model.kept(now, claim, lease, kept);
                }
            }
            12..16 => {
                let some = self.some_claims();
                let ends: Vec<(Claim, Fate)> =
                    some.into_iter().map(|claim| (claim, self.fate())).collect();
                let settled = records.settle(lane, &ends).await.unwrap();
                assert_eq!(settled.len(), ends.len());
                let now = self.since(from);
                for ((claim, fate), settled) in ends.iter().zip(settled) {
                    self.model.settled(now, claim, fate, settled);
                }
            }
            16 => {
                let id = self.pick(&IDS);
                let answer = records.retry(&self.entity, "stage", id).await.unwrap();
                let now = self.since(from);
                self.model.retried(now, id, answer);
            }
            17 => tokio::time::sleep(Duration::from_millis(self.rng.u64(1..8))).await,
            18 => {
                let page = records.list(&self.entity, &Which::default(), 100).await.unwrap();
                self.model.listed(self.since(from), &page.records);
            }
            _ => {
                let counts = records.counts().await.unwrap();
                let ours = counts.iter().find(|lane| lane.entity == self.entity);
                self.model.counted(self.since(from), ours.expect("the queue is there"));
            }
        }
    }
}

pub async fn random_calls_of_the_queues_are_answered_as_a_small_model_says<W: World>() {
    let world = W::new().await;
    for seed in seeds(200) {
        let told = Seed(seed);
        let mut caller = Caller {
            world: &world,
            entity: format!("seed {seed}"),
            rng: Rng::with_seed(seed),
            began: Instant::now(),
            claims: Vec::new(),
            model: Model::default(),
        };
        for _ in 0..CALLS {
            caller.call().await;
        }
        drop(told);
    }
}
