//! The worker, at work: the same on every backend.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{Notify, watch};
use vedetta_core::trace::Label;
use vedetta_core::{Backoff, Command, RunEvent, Span, Spans, Trace};
use vedetta_jobs::{Asking, BoxError, JobEvent, Jobs, NewJob, Outcome, Work, Worker, Working};

use super::{Ask as _, QUEUE, World, eventually};

/// How long jobs are a worker's without a sign of life.
const LEASE: Duration = Duration::from_secs(1);

/// What happens in a worker's handlers, and when it may go on.
#[derive(Clone)]
pub struct Stage {
    seen: Arc<Mutex<Seen>>,
    open: Arc<watch::Sender<Vec<String>>>,
}

#[derive(Default)]
struct Seen {
    running: Vec<String>,
    begun: Vec<String>,
    ended: Vec<String>,
}

/// It runs as long as this lives.
struct Onstage(Stage, String);

impl Drop for Onstage {
    fn drop(&mut self) {
        let mut seen = self.0.seen.lock();
        let at = seen.running.iter().position(|name| *name == self.1).expect("it ran");
        seen.running.remove(at);
        seen.ended.push(self.1.clone());
    }
}

impl Stage {
    fn new() -> Self {
        Self { seen: Arc::default(), open: Arc::new(watch::Sender::new(Vec::new())) }
    }

    fn enter(&self, name: &str) -> Onstage {
        let mut seen = self.seen.lock();
        seen.running.push(name.into());
        seen.begun.push(name.into());
        Onstage(self.clone(), name.into())
    }

    /// Until it may end.
    async fn play(&self, name: &str) {
        let _onstage = self.enter(name);
        let mut open = self.open.subscribe();
        let mine = |open: &Vec<String>| open.iter().any(|open| open == name || open == "all");
        open.wait_for(mine).await.expect("the stage is there");
    }

    /// Those of these names may end.
    fn end(&self, names: &str) {
        let names = names.split_whitespace().map(str::to_owned);
        self.open.send_modify(|open| open.extend(names));
    }

    fn running(&self) -> String {
        let mut running = self.seen.lock().running.clone();
        running.sort();
        running.join(" ")
    }

    fn begun(&self) -> Vec<String> {
        self.seen.lock().begun.clone()
    }

    async fn shows(&self, running: &str) {
        eventually(&format!("{running:?} run"), async || self.running() == running).await;
    }
}

fn slots(slots: u32) -> NonZeroU32 {
    NonZeroU32::new(slots).expect("some slots")
}

fn worker(capacity: u32) -> Worker {
    let first = Duration::from_millis(20);
    Worker::new(QUEUE).capacity(slots(capacity)).lease(LEASE).backoff(Backoff {
        first,
        most: first,
        jitter: 0.0,
    })
}

fn start<W: World>(world: &W, worker: Worker) -> Working {
    worker.start(Arc::clone(world.jobs()) as Arc<dyn Jobs>).expect("it is a worker")
}

/// A worker whose jobs of the kind `play` are on a stage, under the name in their payload.
fn on_stage(stage: &Stage, worker: Worker) -> Worker {
    let stage = stage.clone();
    worker.handler("play", move |_: Work, name: String| {
        let stage = stage.clone();
        async move {
            stage.play(&name).await;
            Ok::<_, BoxError>(())
        }
    })
}

fn play(name: &str, cost: u32) -> NewJob {
    let mut job = NewJob::new("play").payload(&name).expect("a name is JSON");
    job.cost = cost;
    job
}

/// These names, each with this cost.
async fn add<W: World>(world: &W, names: &str, cost: u32) {
    let jobs: Vec<NewJob> = names.split_whitespace().map(|name| play(name, cost)).collect();
    world.enqueue(&jobs).await;
}

pub async fn fourteen_of_cost_1_run_at_once_on_14_slots<W: World>() {
    let (world, stage) = (W::new().await, Stage::new());
    add(&world, "a b c d e f g h i j k l m n o", 1).await;
    let working = start(&world, on_stage(&stage, worker(14)));
    stage.shows("a b c d e f g h i j k l m n").await;
    assert_eq!(working.slots(), (14, 14));
    stage.end("g");
    stage.shows("a b c d e f h i j k l m n o").await;
    stage.end("all");
    eventually("all are done", async || working.status().flow.done == 15).await;
    assert_eq!(working.slots(), (0, 14));
}

pub async fn a_4k_job_takes_all_14_and_ten_small_ones_run_after_it<W: World>() {
    let (world, stage) = (W::new().await, Stage::new());
    add(&world, "4k", 64).await;
    add(&world, "a b c d e f g h i j", 1).await;
    let working = start(&world, on_stage(&stage, worker(14)));
    stage.shows("4k").await;
    // Others have their chance to be wrong.
    tokio::time::sleep(LEASE).await;
    assert_eq!((stage.running().as_str(), working.slots()), ("4k", (14, 14)));
    stage.end("4k");
    stage.shows("a b c d e f g h i j").await;
}

pub async fn after_a_1080p_job_five_of_cost_4_run_three_and_then_two<W: World>() {
    let (world, stage) = (W::new().await, Stage::new());
    add(&world, "1080p", 32).await;
    add(&world, "a b c d e", 4).await;
    let working = start(&world, on_stage(&stage, worker(14)));
    stage.shows("1080p").await;
    stage.end("1080p");
    stage.shows("a b c").await;
    assert_eq!(working.slots(), (12, 14));
    stage.end("a b c");
    stage.shows("d e").await;
}

/// The same with jobs of the kind `ladder`: their parts are on a stage, each with this cost.
fn with_ladders(stage: &Stage, worker: Worker) -> Worker {
    let parts = stage.clone();
    worker.handler_in_parts("ladder", move |work: Work, rungs: Vec<u32>| {
        let stage = parts.clone();
        async move {
            let rungs = rungs.into_iter().map(|cost| {
                let (work, stage) = (work.clone(), stage.clone());
                async move {
                    let held = work.slots(cost).await;
                    stage.play(&format!("{cost}={}", held.slots())).await;
                }
            });
            futures_util::future::join_all(rungs).await;
            Ok::<_, BoxError>(())
        }
    })
}

fn ladder(rungs: &[u32]) -> NewJob {
    NewJob::new("ladder").payload(&rungs).expect("JSON")
}

pub async fn parts_of_jobs_take_slots_each_for_itself<W: World>() {
    let (world, stage) = (W::new().await, Stage::new());
    world.add(ladder(&[64, 8, 4, 2])).await;
    let working = start(&world, with_ladders(&stage, worker(14)));
    stage.shows("64=14").await;
    // While all wait for slots, none is handed out again.
    tokio::time::sleep(LEASE * 2).await;
    assert_eq!(stage.begun(), ["64=14"]);
    stage.end("64=14");
    stage.shows("2=2 4=4 8=8").await;
    assert_eq!(working.slots(), (14, 14));
    world.add(ladder(&[1])).await;
    assert_eq!(stage.running(), "2=2 4=4 8=8");
    stage.end("4=4");
    stage.shows("1=1 2=2 8=8").await;
    stage.end("all");
    eventually("both are done", async || working.status().flow.done == 2).await;
    assert_eq!(working.slots(), (0, 14));
}

pub async fn a_worker_whose_parts_have_all_its_slots_leaves_jobs_to_others<W: World>() {
    let (world, stage) = (W::new().await, Stage::new());
    world.add(ladder(&[12, 3])).await;
    let first = start(&world, with_ladders(&stage, worker(14)));
    stage.shows("12=12").await;
    // The other part waits for what is free. The next job comes while nothing is being taken.
    first.tell(Command::Pause).await;
    eventually("it pauses", async || first.status().paused).await;
    world.add(ladder(&[1])).await;
    first.tell(Command::Resume).await;
    let second = start(&world.neighbour().await, with_ladders(&stage, worker(1)));
    stage.shows("12=12 1=1").await;
    assert_eq!((first.status().flow.taken, second.slots()), (1, (1, 1)));
    stage.end("all");
    eventually("the first is done", async || first.status().flow.done == 1).await;
    eventually("the other is done", async || second.status().flow.done == 1).await;
}

pub async fn a_job_far_longer_than_its_lease_runs_once<W: World>() {
    let (world, stage) = (W::new().await, Stage::new());
    add(&world, "long", 1).await;
    let first = start(&world, on_stage(&stage, worker(1)));
    let second = start(&world.neighbour().await, on_stage(&stage, worker(1)));
    stage.shows("long").await;
    tokio::time::sleep(LEASE * 4).await;
    assert_eq!(stage.begun(), ["long"]);
    stage.end("long");
    let done = || first.status().flow.done + second.status().flow.done;
    eventually("it is done", async || done() == 1).await;
    world.rests().await;
}

pub async fn what_a_worker_that_went_away_had_is_soon_anothers<W: World>() {
    let (world, stage) = (W::new().await, Stage::new());
    add(&world, "a b", 1).await;
    let first = start(&world, on_stage(&stage, worker(2)));
    stage.shows("a b").await;
    let second = start(&world.neighbour().await, on_stage(&stage, worker(2)));
    drop(first);
    eventually("they begin again", async || stage.begun().len() == 4).await;
    stage.end("all");
    eventually("they are done", async || second.status().flow.done == 2).await;
}

pub async fn a_worker_that_is_stopped_finishes_what_runs_and_gives_back_the_rest<W: World>() {
    let (world, stage) = (W::new().await, Stage::new());
    add(&world, "a b c", 1).await;
    let working = start(&world, on_stage(&stage, worker(1)));
    eventually("one runs", async || stage.begun().len() == 1).await;
    let first = stage.running();
    let stopping = tokio::spawn(working.stop(Duration::from_secs(60)));
    stage.end(&first);
    assert_eq!(stopping.await.unwrap(), 0);
    assert_eq!(stage.begun(), [first]);
    let mut left = Vec::new();
    while left.len() < 2 {
        left.push(world.comes(LEASE).await.attempt);
    }
    assert_eq!(left, [1, 1], "they were not begun");
}

pub async fn a_paused_worker_takes_nothing_until_it_is_resumed<W: World>() {
    let (world, stage) = (W::new().await, Stage::new());
    let working = start(&world, on_stage(&stage, worker(4)));
    working.tell(Command::Pause).await;
    eventually("it is paused", async || working.status().paused).await;
    add(&world, "a", 1).await;
    tokio::time::sleep(LEASE * 2).await;
    assert!(stage.begun().is_empty());
    working.tell(Command::Resume).await;
    stage.shows("a").await;
    working.tell(Command::Stop).await;
    stage.end("a");
    eventually("it has ended", async || working.status().has_ended).await;
    assert_eq!(working.status().flow.done, 1);
}

pub async fn whatever_a_handler_does_is_its_jobs_alone<W: World>() {
    let (world, stage) = (W::new().await, Stage::new());
    let tries = stage.clone();
    let worker = on_stage(&stage, worker(8))
        .handler("once-more", move |work: Work, (): ()| {
            let stage = tries.clone();
            async move {
                drop(stage.enter(&format!("try {}", work.attempt())));
                match work.attempt() {
                    1 => Err(BoxError::from("no stock")),
                    2 => panic!("no plan"),
                    3 => {
                        std::future::pending::<()>().await;
                        Ok(Outcome::Settled)
                    }
                    _ => Ok(Outcome::Done(None)),
                }
            }
        })
        .timeout("once-more", Duration::from_millis(100));
    let working = start(&world, worker);
    let mut events = working.events();
    world.add(NewJob::new("once-more")).await;
    add(&world, "beside", 1).await;
    eventually("it is done at last", async || working.status().flow.done == 1).await;
    assert_eq!(stage.running(), "beside");
    let tries: Vec<String> =
        stage.begun().into_iter().filter(|name| name.starts_with("try")).collect();
    assert_eq!(tries, ["try 1", "try 2", "try 3", "try 4"]);
    assert_eq!(working.status().flow.failed, 3);
    let mut heard = Vec::new();
    while let Ok(JobEvent { job, event }) = events.try_recv() {
        if job.kind == "once-more" {
            heard.push(match event {
                RunEvent::Started { failures } => format!("started after {failures}"),
                RunEvent::Failed { why, .. } => format!("failed: {why}"),
                RunEvent::Done { again: None, .. } => "done".into(),
                RunEvent::Running => continue,
                other => panic!("{other:?}"),
            });
        }
    }
    let expected = [
        "started after 0",
        "failed: no stock",
        "started after 1",
        "failed: it panicked: no plan",
        "started after 2",
        "failed: it took longer than 100ms",
        "started after 3",
        "done",
    ];
    assert_eq!(heard, expected);
}

pub async fn a_job_can_ask_to_be_tried_later<W: World>() {
    let (world, stage) = (W::new().await, Stage::new());
    let seen = stage.clone();
    let worker = worker(2).handler("later", move |_: Work, (): ()| {
        let stage = seen.clone();
        async move {
            drop(stage.enter("try"));
            let first = stage.begun().len() == 1;
            let after = Duration::from_millis(50);
            Ok::<_, BoxError>(if first { Outcome::Snooze(after) } else { Outcome::Done(None) })
        }
    });
    let working = start(&world, worker);
    world.add(NewJob::new("later")).await;
    eventually("it was tried twice", async || stage.begun().len() == 2).await;
    eventually("and is done", async || working.status().flow.done == 2).await;
    world.rests().await;
}

pub async fn what_nobody_can_do_is_not_tried_for_ever<W: World>() {
    let world = W::new().await;
    let stage = Stage::new();
    let working = start(&world, on_stage(&stage, worker(4)));
    let mut unknown = NewJob::new("unknown");
    unknown.max_attempts = 2;
    world.enqueue(&[unknown, NewJob::new("play").payload(&7).expect("JSON")]).await;
    eventually("both are set aside", async || {
        let flow = working.status().flow;
        flow.failed + flow.done >= 3
    })
    .await;
    assert!(stage.begun().is_empty());
    tokio::time::sleep(LEASE).await;
    world.rests().await;
}

/// Keeps what it is told.
#[derive(Default)]
struct Told(Mutex<Vec<Span>>);

impl Spans for Told {
    fn samples(&self, _: u128) -> bool {
        true
    }

    fn ended(&self, span: Span) {
        self.0.lock().push(span);
    }

    fn dropped(&self) -> u64 {
        0
    }
}

impl Told {
    /// The spans of this name, in the order in which they began.
    fn named(&self, name: &str) -> Vec<Span> {
        let mut named = self.0.lock().clone();
        named.retain(|span| span.name == name);
        named.sort_by_key(|span| span.began);
        named
    }
}

fn label<'s>(span: &'s Span, name: &str) -> Option<&'s Label> {
    span.labels.iter().find(|(label, _)| *label == name).map(|(_, label)| label)
}

pub async fn what_becomes_of_a_job_is_one_trace<W: World>() {
    let world = W::new().await;
    let told = Arc::new(Told::default());
    let caller = Trace::new(0xabc, 0xdef, true);
    let mut job = NewJob::new("flaky").payload(&"a secret").unwrap().trace(caller);
    let asking = Asking::begin(&mut job, &*told);
    let enqueued = world.jobs().enqueue(std::slice::from_ref(&job)).await.unwrap()[0];
    asking.end(&job, enqueued, &*told);

    let traces = Arc::<Mutex<Vec<Trace>>>::default();
    let seen = Arc::clone(&traces);
    let elsewhere = world.neighbour().await;
    let (begun, may_fail) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let (begins, fails) = (Arc::clone(&begun), Arc::clone(&may_fail));
    let worker =
        worker(1).spans(Arc::clone(&told) as _).handler("flaky", move |work: Work, _: String| {
            seen.lock().extend(work.trace());
            let first = work.attempt() == 1;
            let (begins, fails) = (Arc::clone(&begins), Arc::clone(&fails));
            async move {
                if first {
                    begins.notify_one();
                    fails.notified().await;
                    return Err("a secret");
                }
                Ok(())
            }
        });
    let first = start(&world, worker.clone());
    begun.notified().await;
    // It fails when its worker takes nothing more: another has it the second time.
    tokio::join!(first.stop(Duration::from_secs(60)), async { may_fail.notify_one() });
    assert_eq!(told.named("settle flaky").len(), 1);
    let second = start(&elsewhere, worker);
    eventually("it is done", async || second.status().flow.done == 1).await;
    second.stop(Duration::from_secs(10)).await;

    let (enqueue, waits) = (told.named("enqueue flaky"), told.named("wait flaky"));
    let (attempts, settles) = (told.named("attempt flaky"), told.named("settle flaky"));
    assert_eq!((enqueue.len(), attempts.len(), settles.len()), (1, 2, 2));
    assert_eq!(enqueue[0].parent, Some(caller.span()));
    // A stream does not say since when a message is due again.
    assert!(!waits.is_empty(), "it waited");
    let root = Some(enqueue[0].place.span());
    assert!(waits.iter().chain(&attempts).all(|span| span.parent == root));
    for (attempt, settle) in attempts.iter().zip(&settles) {
        assert_eq!(settle.parent, Some(attempt.place.span()));
        assert!(attempt.began + attempt.took <= settle.began + settle.took);
    }
    let outcomes = settles.iter().map(|span| label(span, "vedetta.job.outcome").cloned());
    let outcomes: Vec<_> = outcomes.map(|label| label.expect("it says so")).collect();
    assert_eq!(outcomes, [Label::from("again"), Label::from("done")]);
    assert_eq!([attempts[0].failed, attempts[1].failed], [Some("error"), None]);
    let places: Vec<Trace> = attempts.iter().map(|span| span.place).collect();
    assert_eq!(*traces.lock(), places, "a handler is told its own place");

    let all = told.0.lock();
    assert!(all.iter().all(|span| span.place.id() == caller.id() && span.place.is_sampled()));
    let spans: std::collections::HashSet<u64> = all.iter().map(|span| span.place.span()).collect();
    assert_eq!(spans.len(), all.len(), "each has a place of its own");
    assert!(!format!("{all:?}").contains("secret"), "{all:?}");
}
