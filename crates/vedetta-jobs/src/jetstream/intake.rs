//! What was pulled and what was handed out.
//!
//! ```text
//!                    pull               take
//!  JetStream ──────────────────► ready ──────► held ──settle──► acknowledged
//!      ▲                           │
//!      └──── not taken in time ────┘
//! ```
//!
//! A pull is opened by a take, for what that has room for; a pull that finds nothing stays open for a
//! while, and what it brings later wakes who waits. What comes and is not taken within a heartbeat is
//! given back: it costs more than there is room for, or its worker takes no more.

use std::collections::{BTreeMap, VecDeque};
use std::iter::{from_fn, once};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use async_nats::jetstream::AckKind;
use async_nats::{Message, StatusCode, Subject, Subscriber};
use futures_util::{FutureExt as _, StreamExt as _};
use hashbrown::hash_map::Entry;
use hashbrown::{HashMap, HashSet};
use tokio::sync::{Notify, mpsc, oneshot};
use tokio::time::{Instant, MissedTickBehavior, interval, timeout, timeout_at};
use tokio_util::sync::CancellationToken;
use vedetta_core::queue::{Settled, Woken};

use super::letter::{Asked, Letter, Reader};
use super::pulls::{End, Opened, Pulls};
use super::{ANSWER, AT_ONCE, BUNCH, Shared, whole_millis};
use crate::job::{Claim, JobId};

/// Of so many jobs at most it is known which deliveries were no attempts.
const FORGIVEN: usize = 1 << 16;

/// So many at most of those that have ended are remembered.
const OVER: usize = 1 << 16;

/// Messages taken in before anything else gets its turn.
const TOGETHER: usize = 64;

/// How long the last messages of an inbox may take.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// All that changes.
#[derive(Debug)]
pub(super) struct State {
    pub pulls: Pulls,
    /// Why the last one ended, if it should not have.
    pub fault: Option<String>,
    /// When the last message came.
    pub heard_at: Instant,
    /// The largest sequence that has come. What comes first comes in order, so that smaller ones may be here.
    newest: u64,
    /// Pulled, and not taken.
    pub ready: VecDeque<Ready>,
    /// Taken, and not settled, by sequence.
    held: HashMap<u64, Held>,
    /// What became of those that are settled, and until when it is known: who said so was not told yet. By claim, as
    /// a message that is put back may be here again by then.
    settled: HashMap<Claim, (Settled, Instant)>,
    /// By sequence, the deliveries that were no attempts: this process gave them back.
    forgiven: BTreeMap<u64, u32>,
    /// By sequence, when those were asked for that have ended here, if that is recorded nowhere.
    over: HashMap<u64, SystemTime>,
    /// Their sequences, as they ended.
    over_in_turn: VecDeque<u64>,
    /// What the last few messages cost, or rather more; unknown before the first.
    cost: Option<f64>,
    /// What comes may have ended before, as far as is recorded, and is to be looked up.
    is_recorded: bool,
    /// A message that could not be looked up.
    pub unanswered: Option<(JobId, SystemTime)>,
    /// Something that is ready may have to be buried.
    has_suspects: bool,
}

#[derive(Debug)]
pub(super) struct Ready {
    pub letter: Arc<Letter>,
    at: Instant,
    /// It has not ended, as far as is recorded.
    is_known: bool,
}

/// A message that was handed out.
#[derive(Debug)]
pub(super) struct Held {
    /// As it was delivered last.
    pub letter: Arc<Letter>,
    /// Of the claim under which it was handed out.
    token: i64,
    /// The how manieth attempt it is.
    pub attempt: u32,
    /// Until then it is given to nobody else.
    pub until: Instant,
    pub story: Story,
}

/// What a monitor is told of it.
#[derive(Debug, Clone, Default)]
pub(super) struct Story {
    pub worker: Option<String>,
    pub started_at: Option<SystemTime>,
    pub progress: f32,
    pub message: Option<String>,
    pub log: String,
}

impl Story {
    /// It begins with this worker.
    pub(super) fn of(worker: &str) -> Self {
        let started_at = Some(whole_millis(SystemTime::now()));
        let worker = Some(worker.to_owned());
        Self { worker, started_at, ..Self::default() }
    }
}

impl State {
    pub(super) fn new(pulls: Pulls, is_recorded: bool) -> Self {
        Self {
            pulls,
            fault: None,
            heard_at: Instant::now(),
            newest: 0,
            ready: VecDeque::new(),
            held: HashMap::new(),
            settled: HashMap::new(),
            forgiven: BTreeMap::new(),
            over: HashMap::new(),
            over_in_turn: VecDeque::new(),
            cost: None,
            is_recorded,
            unanswered: None,
            has_suspects: false,
        }
    }

    /// How often a message was begun, with this time.
    pub(super) fn attempt(&self, letter: &Letter) -> u32 {
        let forgiven = self.forgiven.get(&letter.sequence).copied().unwrap_or(0);
        letter.delivered.saturating_sub(forgiven).max(1)
    }

    /// This delivery was no attempt.
    pub(super) fn forgive(&mut self, sequence: u64) {
        *self.forgiven.entry(sequence).or_default() += 1;
        if self.forgiven.len() > FORGIVEN {
            self.forgiven.pop_first();
        }
    }

    /// There will be no more deliveries of it.
    pub(super) fn is_over(&mut self, letter: &Letter) {
        self.forgiven.remove(&letter.sequence);
        if !self.is_recorded && self.over.insert(letter.sequence, letter.published).is_none() {
            self.over_in_turn.push_back(letter.sequence);
            if self.over_in_turn.len() > OVER
                && let Some(oldest) = self.over_in_turn.pop_front()
            {
                self.over.remove(&oldest);
            }
        }
    }

    /// Whether it has ended here, as far as is remembered.
    pub(super) fn was_over(&self, letter: &Letter) -> bool {
        self.over.get(&letter.sequence) == Some(&letter.published)
    }

    /// Opens a pull for as much as there is room for; for one, before anything is known of what they cost. Whatever
    /// does not fit has to be given back, and is then delivered once more.
    pub(super) fn open(&mut self, room: u32, most: usize) -> Option<Opened> {
        #[allow(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "neither large nor negative"
        )]
        let fit = self.cost.map_or(1, |cost| (f64::from(room) / cost) as usize);
        self.pulls.open(fit, most, Instant::now())
    }

    /// The next message to hand out; those that are no jobs, or were begun too often, wait to be buried.
    /// It is held until `ack_wait` after it came.
    pub(super) fn next(&mut self, ack_wait: Duration) -> Option<(Arc<Letter>, Asked, Instant)> {
        let is_next = |ready: &Ready| ready.is_known && !self.is_poison(&ready.letter);
        let at = self.ready.iter().position(is_next)?;
        let asked = self.ready[at].letter.asked.clone().ok()?;
        let ready = self.ready.remove(at)?;
        Some((ready.letter, asked, ready.at + ack_wait))
    }

    /// Those.
    pub(super) fn poison(&mut self) -> Vec<Arc<Letter>> {
        if !self.has_suspects {
            return Vec::new();
        }
        let is_poison =
            |state: &Self, ready: &Ready| ready.is_known && state.is_poison(&ready.letter);
        let ready = std::mem::take(&mut self.ready);
        let (poison, ready): (Vec<_>, Vec<_>) =
            ready.into_iter().partition(|ready| is_poison(self, ready));
        self.ready = ready.into();
        self.has_suspects = self.ready.iter().any(|ready| ready.letter.is_suspect());
        poison.into_iter().map(|ready| ready.letter).collect()
    }

    /// Those of which it is to be looked up whether they have ended before, and when they were asked for.
    pub(super) fn unknown(&self) -> Vec<(JobId, SystemTime)> {
        if !self.is_recorded {
            return Vec::new();
        }
        let unknown = self.ready.iter().filter(|ready| !ready.is_known);
        unknown.map(|ready| ready.letter.id()).collect()
    }

    /// These were looked up. Those that are over are ready no more.
    pub(super) fn are_known(
        &mut self,
        known: &[(JobId, SystemTime)],
        is_over: impl Fn(u64) -> bool,
    ) -> Vec<Arc<Letter>> {
        let known: HashSet<u64> = known.iter().map(|(id, _)| id.0).collect();
        for ready in &mut self.ready {
            ready.is_known |= known.contains(&ready.letter.sequence);
        }
        let is_over = |ready: &Ready| is_over(ready.letter.sequence);
        if !self.ready.iter().any(is_over) {
            return Vec::new();
        }
        let ready = std::mem::take(&mut self.ready);
        let (over, ready): (Vec<_>, Vec<_>) = ready.into_iter().partition(is_over);
        self.ready = ready.into();
        over.iter().for_each(|ready| self.is_over(&ready.letter));
        over.into_iter().map(|ready| ready.letter).collect()
    }

    /// A message that is here no longer is: it was called off.
    pub(super) fn drop_out(&mut self, sequence: u64) -> Option<Arc<Letter>> {
        self.forgiven.remove(&sequence);
        if let Some(held) = self.held.remove(&sequence) {
            return Some(held.letter);
        }
        let at = self.ready.iter().position(|ready| ready.letter.sequence == sequence)?;
        self.ready.remove(at).map(|ready| ready.letter)
    }

    fn is_poison(&self, letter: &Letter) -> bool {
        let exhausted = |most: u32| self.attempt(letter) > most;
        letter.asked.as_ref().map_or(true, |asked| exhausted(asked.max_attempts))
    }

    /// What all that is ready costs.
    pub(super) fn ready_cost(&self, capacity: u32) -> u32 {
        let costs = self.ready.iter().filter_map(|ready| ready.letter.asked.as_ref().ok());
        costs.fold(0, |sum: u32, asked| sum.saturating_add(asked.cost.min(capacity)))
    }

    pub(super) fn hold(&mut self, letter: Arc<Letter>, story: Story, until: Instant) -> &Held {
        let (sequence, attempt) = (letter.sequence, self.attempt(&letter));
        // A server that was killed counts deliveries from an earlier one on: this is another one.
        let claim = letter.claim();
        self.forget_settled(claim);
        let held = Held { letter, token: claim.token, attempt, until, story };
        self.held.entry(sequence).insert(held).into_mut()
    }

    /// What is held by this claim, for sure.
    pub(super) fn held(&mut self, claim: Claim, now: Instant) -> Option<&mut Held> {
        let held = self.held.get_mut(&claim.id.0)?;
        (held.token == claim.token && now < held.until).then_some(held)
    }

    /// It is settled, which is known until then.
    pub(super) fn settle(&mut self, claim: Claim, settled: Settled, until: Instant) {
        self.let_go(claim);
        self.settled.insert(claim, (settled, until));
    }

    /// What became of it, if it is settled.
    pub(super) fn settled(&self, claim: Claim) -> Option<Settled> {
        self.settled.get(&claim).map(|(settled, _)| *settled)
    }

    /// It is held no longer, and whoever did knows.
    pub(super) fn let_go(&mut self, claim: Claim) {
        self.forget_settled(claim);
        if let Entry::Occupied(held) = self.held.entry(claim.id.0)
            && held.get().token == claim.token
        {
            held.remove();
        }
    }

    fn forget_settled(&mut self, claim: Claim) {
        // There are none as a rule.
        if !self.settled.is_empty() {
            self.settled.remove(&claim);
        }
    }

    /// What nobody kept is nobody's, nor what was not taken for as long: then this process did not run, and
    /// somebody else has it.
    pub(super) fn forget_lapsed(&mut self, ack_wait: Duration) {
        let now = Instant::now();
        self.held.retain(|_, held| now < held.until);
        self.settled.retain(|_, (_, until)| now < *until);
        self.forget_untaken(ack_wait);
    }

    /// Forgets what was ready for so long that somebody else has it by now.
    pub(super) fn forget_untaken(&mut self, ack_wait: Duration) {
        let now = Instant::now();
        while self.ready.front().is_some_and(|oldest| now >= oldest.at + ack_wait) {
            self.ready.pop_front();
        }
    }

    /// Whether a message is here.
    pub(super) fn has(&self, sequence: u64) -> bool {
        self.held.contains_key(&sequence)
            || self.ready.iter().any(|ready| ready.letter.sequence == sequence)
    }

    /// How many messages are here, and not settled.
    pub(super) fn ours(&self) -> usize {
        self.ready.len() + self.held.len()
    }

    /// Where to acknowledge what is ready since before then.
    pub(super) fn came_before(&self, then: Instant) -> Vec<Subject> {
        let early = self.ready.iter().take_while(|ready| ready.at < then);
        early.map(|ready| ready.letter.reply.clone()).collect()
    }

    /// Takes in a message. Whether it was held here for so long that it is lost now. One that is held still goes on:
    /// the server has forgotten that it delivered it, and awaits the end of this delivery now.
    fn arrived(&mut self, letter: Arc<Letter>, now: Instant) -> bool {
        self.pulls.came(now);
        if let Ok(asked) = &letter.asked {
            let cost = f64::from(asked.cost);
            // After a dear one fewer are pulled at once, after cheap ones more by and by.
            self.cost = Some(self.cost.map_or(cost, |last| cost.max(last + (cost - last) / 4.0)));
        }
        self.heard_at = now;
        let sequence = letter.sequence;
        let may_be_here = sequence <= self.newest;
        self.newest = self.newest.max(sequence);
        let is_known = !self.is_recorded;
        let is_suspect = letter.is_suspect();
        let ready = Ready { letter, at: now, is_known };
        let mut was_held = false;
        if may_be_here {
            if let Some(held) = self.held.get_mut(&sequence).filter(|held| now < held.until) {
                held.letter = ready.letter;
                self.forgive(sequence);
                return false;
            }
            self.ready.retain(|ready| ready.letter.sequence != sequence);
            was_held = self.held.remove(&sequence).is_some();
        }
        self.has_suspects |= is_suspect;
        self.ready.push_back(ready);
        was_held
    }

    /// What was ready for too long.
    fn overdue(&mut self, patience: Duration) -> Vec<Arc<Letter>> {
        let old = |ready: &Ready| ready.at.elapsed() >= patience;
        let mut overdue = Vec::new();
        while self.ready.front().is_some_and(old) {
            overdue.extend(self.ready.pop_front().map(|ready| ready.letter));
        }
        overdue
    }
}

/// Takes in what comes, until told to stop; then gives back what is ready.
pub(super) async fn run(
    shared: &Shared,
    mut inbox: Subscriber,
    mut left: mpsc::Receiver<oneshot::Sender<()>>,
    connected: &Notify,
    stop: CancellationToken,
) {
    // So what is not taken in time is noticed within a heartbeat.
    let patience = shared.options.heartbeat * 3 / 4;
    let mut ticks = interval((shared.options.heartbeat / 4).min(Duration::from_millis(250)));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut reader = Reader::new(&shared.context);
    // That there is the first connection is said, too.
    let mut connects = shared.connects();
    loop {
        let mut stepping_back = None;
        tokio::select! {
            () = stop.cancelled() => break,
            message = inbox.next() => {
                let Some(message) = message else { break };
                let come_too = || inbox.next().now_or_never().flatten();
                let come = once(message).chain(from_fn(come_too)).take(TOGETHER);
                shared.take_in(come, &mut reader);
            }
            Some(done) = left.recv() => {
                shared.state.lock().pulls.leave();
                stepping_back = Some(done);
            }
            () = connected.notified() => {
                let before = std::mem::replace(&mut connects, shared.connects());
                if connects != before {
                    shared.reconnected();
                }
            }
            _ = ticks.tick() => {
                let (overdue, is_to_look) = {
                    let mut state = shared.state.lock();
                    state.forget_lapsed(shared.options.ack_wait);
                    let has_lapsed = state.pulls.lapse(Instant::now());
                    (state.overdue(patience), has_lapsed || state.pulls.were_refused())
                };
                if is_to_look {
                    shared.call();
                }
                shared.give_back(&overdue).await;
            }
        }
        if !shared.state.lock().pulls.have_left() {
            continue;
        }
        let name = shared.client.new_inbox();
        let Ok(next) = shared.client.subscribe(format!("{name}.*")).await else { continue };
        shared.leave(std::mem::replace(&mut inbox, next)).await;
        if stepping_back.is_some() {
            shared.give_all_back().await;
        }
        shared.state.lock().pulls.move_to(name);
        shared.call();
        // If nobody waits for it any more, it is done all the same.
        let _ = stepping_back.map(|done| done.send(()));
    }
    shared.state.lock().pulls.leave();
    shared.leave(inbox).await;
    shared.give_all_back().await;
}

impl Shared {
    /// Takes in what has come by now.
    fn take_in(&self, come: impl Iterator<Item = Message>, reader: &mut Reader) {
        // Rather too early than too late.
        let now = Instant::now();
        let mut letters = Vec::new();
        for message in come {
            match message.status {
                None | Some(StatusCode::OK) => letters.extend(reader.read(message, &self.options)),
                Some(status) => {
                    self.have_come(std::mem::take(&mut letters), now);
                    self.heard(&message, status);
                    if self.state.lock().pulls.were_refused() {
                        // The next would be, too: there is another look with a tick.
                        self.turn.notify_waiters();
                    } else {
                        self.call();
                    }
                }
            }
        }
        self.have_come(letters, now);
    }

    fn have_come(&self, letters: Vec<Arc<Letter>>, now: Instant) {
        if letters.is_empty() {
            return;
        }
        let (was_held, are_a_few_more) = {
            let mut state = self.state.lock();
            let before = state.ready.len();
            let mut was_held = false;
            letters.into_iter().for_each(|letter| was_held |= state.arrived(letter, now));
            let ready = state.ready.len();
            let has_grown = before == 0 || ready / BUNCH != before / BUNCH;
            (was_held, !has_grown && state.pulls.is_any_open())
        };
        if was_held {
            self.bell.ring(Woken::Look);
        }
        // Who is to take the first of them takes the others along.
        if !are_a_few_more {
            self.call();
        }
    }

    /// Has somebody look at what is ready.
    fn call(&self) {
        self.turn.notify_waiters();
        self.bell.ring(Woken::More);
    }

    /// A pull gave a sign, or ended.
    fn heard(&self, message: &Message, status: StatusCode) {
        let number = message.subject.rsplit('.').next().and_then(|number| number.parse().ok());
        let Some(number) = number else { return };
        let mut state = self.state.lock();
        let end = match (status, undelivered(message)) {
            (StatusCode::IDLE_HEARTBEAT, _) => {
                state.pulls.lives(number, Instant::now());
                return;
            }
            (StatusCode::TIMEOUT | StatusCode::NOT_FOUND, Some(count)) => End::Without(count),
            (StatusCode::TIMEOUT, None) => End::Refused,
            (StatusCode::NOT_FOUND, None) => End::NoMore,
            (other, _) => {
                if state.pulls.is_open(number) {
                    let why = message.description.as_deref().unwrap_or("no more is said");
                    state.fault = Some(format!("the server ended a pull: {other}, {why}"));
                    state.pulls.leave();
                    // Somebody else may be the consumer's leader, and not know all of it.
                    self.untidy.notify_one();
                }
                return;
            }
        };
        state.pulls.ended(number, end);
    }

    /// A connection that was lost took its pulls with it, or not, and there may be another server.
    fn reconnected(&self) {
        self.untidy.notify_one();
        self.state.lock().pulls.leave();
    }

    /// Has nothing more come to an inbox, and takes in what did. What is on its way to an inbox that was left would come
    /// again after `ack_wait` only: so that is awaited first. No pull brings for long what there is at once.
    async fn leave(&self, mut inbox: Subscriber) {
        let mut reader = Reader::new(&self.context);
        let (last, mut patience) = (Instant::now() + ANSWER, AT_ONCE);
        while self.connected().is_ok() && Instant::now() < last {
            if let Ok(message) = timeout(patience, inbox.next()).await {
                let Some(message) = message else { return };
                self.take_in(once(message), &mut reader);
                patience = AT_ONCE;
                continue;
            }
            patience *= 2;
            // What is not here may be on its way, or with others; or there is nobody any more who brings it.
            let asked = timeout_at(last, self.deliveries()).await;
            if patience > LAST_WORDS / 4 || !matches!(asked, Ok(Ok(found)) if !found.are_all_here) {
                break;
            }
        }
        if inbox.drain().await.is_ok() {
            while let Ok(Some(message)) = timeout(LAST_WORDS, inbox.next()).await {
                self.take_in(once(message), &mut reader);
            }
        }
    }

    async fn give_all_back(&self) {
        let left = self.state.lock().overdue(Duration::ZERO);
        self.give_back(&left).await;
        let _ = timeout(LAST_WORDS, self.client.flush()).await;
    }

    async fn give_back(&self, letters: &[Arc<Letter>]) {
        for letter in letters {
            // If it is lost, the message comes back when its time is over.
            let given = self.client.publish(letter.reply.clone(), AckKind::Nak(None).into()).await;
            if given.is_ok() {
                self.state.lock().forgive(letter.sequence);
            }
        }
    }
}

/// How much of a pull that has ended was not delivered, if the message says so.
fn undelivered(message: &Message) -> Option<usize> {
    message.headers.as_ref()?.get("Nats-Pending-Messages")?.as_str().parse().ok()
}
