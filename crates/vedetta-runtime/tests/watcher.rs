//! The watcher, story by story, in paused time.

mod support;

use std::collections::{HashMap, VecDeque};
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use support::World;
use tokio::time::{Instant, sleep};
use vedetta_core::{
    Change, Changes, Failure, Feed, KeyRange, Page, Revision, RunEvent, Source, SourceError,
};
use vedetta_runtime::watcher::{BoxError, Effect, Id, Phase, Wanted, WatcherEvent};
use vedetta_runtime::{Next, Reconcile, State, Watcher, Watching};

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

const PATIENCE: Duration = Duration::from_secs(60);

#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Room {
    meta: Option<u32>,
    mixer: Option<String>,
    status: Option<String>,
}

impl State for Room {
    fn apply(&mut self, key_type: &str, value: Option<&[u8]>) -> Result<Effect, BoxError> {
        let text = value.map(std::str::from_utf8).transpose()?;
        match key_type {
            "meta" => self.meta = text.map(str::parse).transpose()?,
            "mixer" => self.mixer = text.map(ToOwned::to_owned),
            "status" => {
                self.status = text.map(ToOwned::to_owned);
                return Ok(Effect::Quiet);
            }
            other => panic!("no key type {other}"),
        }
        Ok(Effect::Wanted)
    }
}

#[derive(Debug, Clone, Copy)]
enum Does {
    Fail,
    Panic,
    Take(u64),
    Hang,
    Again(u64),
}

/// Does with each id what it is told, then succeeds; and remembers it all.
#[derive(Clone, Default)]
struct Hand(Arc<Mutex<Log>>);

#[derive(Default)]
struct Log {
    began: Option<Instant>,
    does: HashMap<String, VecDeque<Does>>,
    rebuilds: VecDeque<Does>,
    lines: Vec<String>,
}

impl Hand {
    fn will(&self, id: &str, does: impl IntoIterator<Item = Does>) {
        self.0.lock().does.entry(id.to_owned()).or_default().extend(does);
    }

    fn rebuild_will(&self, does: impl IntoIterator<Item = Does>) {
        self.0.lock().rebuilds.extend(does);
    }

    fn note(&self, what: &str) {
        let mut log = self.0.lock();
        let began = *log.began.get_or_insert_with(Instant::now);
        let line = format!("{} {what}", began.elapsed().as_millis());
        log.lines.push(line);
    }

    /// What happened since the last look.
    fn lines(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock().lines)
    }
}

impl Reconcile for Hand {
    type State = Room;

    async fn rebuild(&self, wanted: &Wanted<Room>) -> Result<(), BoxError> {
        let mut ids: Vec<_> = wanted.iter().map(|(id, _)| id.to_string()).collect();
        ids.sort();
        self.note(&format!("rebuild {} at {}", ids.join(" "), wanted.revision));
        let does = self.0.lock().rebuilds.pop_front();
        match does {
            Some(Does::Fail) => Err("cannot look".into()),
            Some(Does::Panic) => panic!("cannot look at all"),
            Some(Does::Take(millis)) => {
                sleep(ms(millis)).await;
                Ok(())
            }
            _ => Ok(()),
        }
    }

    async fn reconcile(&self, id: &Id, state: Option<&Room>) -> Result<Next, BoxError> {
        let what = match state {
            None => "gone".to_owned(),
            Some(room) => {
                let meta = room.meta.map_or("-".to_owned(), |meta| meta.to_string());
                format!("{meta} {}", room.mixer.as_deref().unwrap_or("-"))
            }
        };
        self.note(&format!("{id}: {what}"));
        let does = self.0.lock().does.get_mut(&id.to_string()).and_then(VecDeque::pop_front);
        match does {
            Some(Does::Fail) => return Err("not now".into()),
            Some(Does::Panic) => panic!("not at all"),
            Some(Does::Take(millis)) => {
                sleep(ms(millis)).await;
                self.note(&format!("{id} ended"));
            }
            Some(Does::Hang) => std::future::pending().await,
            Some(Does::Again(millis)) => return Ok(Next::After(ms(millis))),
            None => {}
        }
        Ok(Next::Done)
    }
}

fn rooms() -> Watcher {
    Watcher::new("/rooms/").key_types(["meta", "mixer", "status"])
}

/// A watcher that follows `world`; what led there is forgotten.
async fn watching(watcher: Watcher, world: &World) -> (Watching<Room>, Hand) {
    let hand = Hand::default();
    let watching = watcher.start(world.clone(), hand.clone());
    watching.ready(PATIENCE).await.unwrap();
    sleep(ms(1)).await;
    hand.lines();
    hand.0.lock().began = Some(Instant::now());
    (watching, hand)
}

fn ids(watching: &Watching<Room>) -> Vec<String> {
    let all = watching.all();
    let mut ids: Vec<_> = all.iter().map(|(id, _)| id.to_string()).collect();
    ids.sort();
    ids
}

// W1, W2, W3: list, rebuild, follow.

#[tokio::test(start_paused = true)]
async fn a_start_lists_every_page_into_a_typed_cache_and_knows_its_revision() {
    let world = World::new(); // two keys a page
    for (id, meta) in [("a", "1"), ("b", "2"), ("c", "3")] {
        world.put(format!("/rooms/{id}/meta"), meta);
    }
    world.put("/rooms/c/mixer", "m1");
    world.put("/roomsother/x/meta", "9");
    let revision = world.put("/else", "x");
    let hand = Hand::default();
    let watching = rooms().start(world.clone(), hand.clone());
    watching.ready(PATIENCE).await.unwrap();
    assert_eq!(ids(&watching), ["a", "b", "c"]);
    assert_eq!(watching.all().revision, revision);
    let c = Room { meta: Some(3), mixer: Some("m1".into()), status: None };
    assert_eq!(watching.get("c").as_deref(), Some(&c));
    assert_eq!(watching.get("x"), None);
    sleep(ms(1)).await;
    let story = ["0 rebuild a b c at 7", "0 a: 1 -", "0 b: 2 -", "0 c: 3 m1"];
    assert_eq!(hand.lines(), story, "every id once, after the rebuild");
}

#[tokio::test(start_paused = true)]
async fn a_start_that_takes_too_long_says_what_it_is_at_and_why() {
    let world = World::new();
    world.cut();
    let watching = rooms().start(world.clone(), Hand::default());
    let error = watching.ready(ms(500)).await.unwrap_err();
    assert_eq!(error.at, Phase::Waiting);
    assert_eq!(
        error.to_string(),
        "the watcher is not ready, it is waiting to try the source again; the world is down"
    );
    world.mend();
    watching.ready(PATIENCE).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn nothing_is_reconciled_before_a_rebuild_has_succeeded() {
    let world = World::new();
    world.put("/rooms/a/meta", "1");
    let hand = Hand::default();
    hand.rebuild_will([Does::Fail, Does::Panic, Does::Take(50)]);
    let watching = rooms().start(world.clone(), hand.clone());
    sleep(ms(310)).await;
    let why = watching.status().last_error;
    assert_eq!(why.as_deref(), Some("rebuilding failed: it panicked: cannot look at all"));
    world.put("/rooms/a/meta", "2"); // while the third one looks
    watching.ready(PATIENCE).await.unwrap();
    sleep(ms(1)).await;
    let story = ["0 rebuild a at 2", "100 rebuild a at 2", "300 rebuild a at 2", "350 a: 2 -"];
    assert_eq!(hand.lines(), story);
    assert_eq!(watching.status().last_error, None, "all is well again");
}

#[tokio::test(start_paused = true)]
async fn puts_and_deletes_update_the_cache_at_once() {
    let world = World::new();
    let (watching, hand) = watching(rooms(), &world).await;
    hand.will("a", [Does::Hang]); // the cache does not wait for handlers
    world.put("/rooms/a/meta", "1");
    let revision = world.put("/rooms/a/meta", "2");
    watching.caught_up(revision).await;
    assert_eq!(watching.get("a").unwrap().meta, Some(2));
    let revision = world.delete("/rooms/a/meta");
    watching.caught_up(revision).await;
    assert_eq!(watching.get("a"), None);
    assert_eq!(watching.all().revision, revision);
}

// W4, W5: the schedule and the waits.

#[tokio::test(start_paused = true)]
async fn the_example_flow_of_the_pattern() {
    let world = World::new();
    let (_watching, hand) = watching(rooms(), &world).await;
    hand.will("room1", [Does::Fail]);
    world.put("/rooms/room1/meta", "1");
    world.put("/rooms/room1/meta", "2"); // ignored: it is already scheduled
    sleep(ms(10)).await;
    world.delete("/rooms/room1/meta"); // brings the retry forward, but no nearer than 100 ms
    sleep(ms(1_000)).await;
    assert_eq!(hand.lines(), ["0 room1: 2 -", "100 room1: gone"]);
    hand.will("room1", [Does::Fail]);
    world.put("/rooms/room1/meta", "3");
    sleep(ms(1_000)).await;
    let story = ["1010 room1: 3 -", "1110 room1: 3 -"];
    assert_eq!(hand.lines(), story, "a success reset the counter");
}

#[tokio::test(start_paused = true)]
async fn a_failing_id_is_tried_again_after_each_wait_of_the_table() {
    let world = World::new();
    let (watching, hand) = watching(rooms(), &world).await;
    hand.will("a", std::iter::repeat_n(Does::Fail, 10));
    world.put("/rooms/a/meta", "1");
    sleep(ms(60_000)).await;
    let waits = [100, 200, 400, 800, 1_600, 3_200, 6_400, 10_000, 10_000, 10_000];
    let mut at = 0;
    let mut story = vec!["0 a: 1 -".to_owned()];
    for wait in waits {
        at += wait;
        story.push(format!("{at} a: 1 -"));
    }
    assert_eq!(hand.lines(), story);
    assert_eq!((watching.status().failing, watching.status().failed), (0, 10));
}

#[tokio::test(start_paused = true)]
async fn a_change_begins_the_waits_anew_and_a_status_of_its_own_does_not() {
    let world = World::new();
    let (watching, hand) = watching(rooms(), &world).await;
    hand.will("a", std::iter::repeat_n(Does::Fail, 7));
    world.put("/rooms/a/meta", "1"); // at 0, 100, 300, 700
    sleep(ms(750)).await;
    for n in 0..20 {
        world.put("/rooms/a/status", n.to_string()); // quiet
        sleep(ms(10)).await;
    }
    let trouble = watching.troubles(9);
    assert_eq!(trouble.len(), 1);
    assert_eq!((trouble[0].1.failures, trouble[0].1.error.as_deref()), (4, Some("not now")));
    assert_eq!(trouble[0].1.retry_in, Some(ms(550)));
    assert_eq!(watching.get("a").unwrap().status.as_deref(), Some("19"), "it is seen, though");
    world.put("/rooms/a/meta", "2"); // at 950: at once, as 100 ms have passed
    sleep(ms(2_000)).await;
    let story = [
        "0 a: 1 -",
        "100 a: 1 -",
        "300 a: 1 -",
        "700 a: 1 -",
        "950 a: 2 -",
        "1050 a: 2 -",
        "1250 a: 2 -",
        "1650 a: 2 -",
    ];
    assert_eq!(hand.lines(), story);
}

#[tokio::test(start_paused = true)]
async fn a_quiet_key_type_is_seen_and_triggers_nothing() {
    let world = World::new();
    let (watching, hand) = watching(rooms().quiet(["mixer"]), &world).await;
    world.put("/rooms/a/meta", "1");
    sleep(ms(10)).await;
    world.put("/rooms/a/mixer", "m1");
    sleep(ms(10)).await;
    assert_eq!(watching.get("a").unwrap().mixer.as_deref(), Some("m1"));
    world.delete("/rooms/a/mixer");
    sleep(ms(10)).await;
    assert_eq!(watching.get("a").unwrap().mixer, None);
    world.put("/rooms/a/meta", "2");
    sleep(ms(10)).await;
    assert_eq!(hand.lines(), ["0 a: 1 -", "30 a: 2 -"]);
}

#[tokio::test(start_paused = true)]
async fn changes_of_a_failing_id_do_not_make_it_a_busy_loop() {
    let world = World::new();
    let (_watching, hand) = watching(rooms(), &world).await;
    hand.will("a", std::iter::repeat_n(Does::Fail, 1_000));
    for n in 0..1_000 {
        world.put("/rooms/a/meta", n.to_string());
        sleep(ms(1)).await;
    }
    assert_eq!(hand.lines().len(), 10, "one try each 100 ms, whatever changes");
}

#[tokio::test(start_paused = true)]
async fn a_handler_may_ask_to_be_called_again() {
    let world = World::new();
    let (_watching, hand) = watching(rooms(), &world).await;
    hand.will("a", [Does::Again(500)]);
    world.put("/rooms/a/meta", "1");
    sleep(ms(2_000)).await;
    assert_eq!(hand.lines(), ["0 a: 1 -", "500 a: 1 -"]);
}

// W6: lost, compacted, away.

#[tokio::test(start_paused = true)]
async fn a_lost_line_is_taken_up_where_it_dropped_without_a_list() {
    let world = World::new();
    world.put("/rooms/a/meta", "1");
    world.put("/rooms/b/meta", "1");
    let (watching, hand) = watching(rooms(), &world).await;
    world.cut();
    sleep(ms(1)).await;
    world.put("/rooms/a/meta", "2");
    world.delete("/rooms/b/meta");
    world.put("/rooms/c/meta", "3");
    sleep(ms(5_000)).await;
    assert_eq!(ids(&watching), ["a", "b"], "it knows nothing of it yet");
    assert_eq!(hand.lines(), [""; 0]);
    world.mend();
    sleep(ms(10_000)).await;
    let lines: Vec<_> =
        hand.lines().iter().map(|l| l.split_once(' ').unwrap().1.to_owned()).collect();
    let story = ["rebuild a c at 6", "a: 2 -", "b: gone", "c: 3 -"];
    assert_eq!(lines, story, "what is at hand is taken in, then the rebuild, then the runs");
    assert_eq!((world.lists(), watching.status().lists), (1, 1));
    assert!(watching.status().lost >= 4, "{:?}", watching.status());
}

#[tokio::test(start_paused = true)]
async fn a_rebuild_after_a_lost_line_knows_all_that_was_there_when_it_was_mended() {
    let world = World::new();
    world.put("/rooms/a/meta", "1");
    let (_watching, hand) = watching(rooms(), &world).await;
    world.cut();
    sleep(ms(1)).await;
    world.put("/rooms/a/meta", "2");
    world.put("/elsewhere", "x");
    world.put("/rooms/b/meta", "1"); // somebody else has begun this one, where we look, too
    world.delete("/rooms/a/meta");
    world.put("/rooms/c/meta", "1");
    world.slow(ms(100));
    world.mend();
    // What is written from now on is not waited for.
    while world.opened().len() < 2 {
        sleep(ms(10)).await;
    }
    world.put("/rooms/d/meta", "1");
    sleep(ms(10_000)).await;
    let lines = hand.lines();
    let lines: Vec<_> = lines.iter().map(|line| line.split_once(' ').unwrap().1).collect();
    assert_eq!(lines[0], "rebuild b c at 7", "{lines:?}");
    let mut runs = lines[1..].to_vec();
    runs.sort_unstable();
    assert_eq!(runs, ["a: gone", "b: 1 -", "c: 1 -", "d: 1 -"], "{lines:?}");
}

#[tokio::test(start_paused = true)]
async fn a_line_that_drops_again_before_all_was_brought_has_nothing_done_in_between() {
    let world = World::new();
    world.put("/rooms/a/meta", "1");
    let (watching, hand) = watching(rooms(), &world).await;
    world.cut();
    sleep(ms(1)).await;
    world.put("/rooms/a/meta", "2");
    world.put("/rooms/b/meta", "1");
    world.slow(ms(500));
    world.mend();
    while watching.get("a").unwrap().meta != Some(2) {
        sleep(ms(10)).await;
    }
    world.cut();
    sleep(ms(5_000)).await;
    assert_eq!(hand.lines(), [""; 0], "it is known that something is missing");
    world.mend();
    sleep(ms(20_000)).await;
    let lines = hand.lines();
    let lines: Vec<_> = lines.iter().map(|line| line.split_once(' ').unwrap().1).collect();
    assert_eq!(lines, ["rebuild a b at 4", "a: 2 -", "b: 1 -"]);
}

#[tokio::test(start_paused = true)]
async fn what_was_deleted_while_the_history_was_lost_is_seen_as_deleted() {
    let world = World::new();
    for id in ["a", "b", "c"] {
        world.put(format!("/rooms/{id}/meta"), "1");
    }
    world.put("/rooms/c/mixer", "m");
    let (watching, hand) = watching(rooms(), &world).await;
    let mut events = watching.events();
    world.cut();
    sleep(ms(1)).await;
    world.delete("/rooms/a/meta");
    world.delete("/rooms/b/meta");
    world.put("/rooms/b/meta", "1"); // the same value, but another key
    world.delete("/rooms/c/mixer");
    world.put("/rooms/d/meta", "4");
    world.compact();
    world.mend();
    sleep(ms(10_000)).await;
    let mut lines: Vec<_> =
        hand.lines().iter().map(|l| l.split_once(' ').unwrap().1.to_owned()).collect();
    assert_eq!(lines.remove(0), "rebuild b c d at 10", "before anything else");
    lines.sort();
    assert_eq!(lines, ["a: gone", "b: 1 -", "c: 1 -", "d: 4 -"]);
    assert_eq!(ids(&watching), ["b", "c", "d"]);
    assert_eq!(world.lists(), 2);
    let mut told = Vec::new();
    while let Ok(event) = events.try_recv() {
        told.push(event);
    }
    assert!(told.contains(&WatcherEvent::Compacted));
    assert!(told.contains(&WatcherEvent::Listed { revision: Revision(10), ids: 3 }));
    assert!(told.contains(&WatcherEvent::Rebuilt));
}

#[tokio::test(start_paused = true)]
async fn of_a_source_that_went_back_nothing_known_is_trusted() {
    let world = World::new();
    let before = world.put("/rooms/a/meta", "1");
    world.put("/rooms/a/meta", "2");
    let revision = world.put("/rooms/b/meta", "2");
    let (watching, hand) = watching(rooms(), &world).await;
    let mut events = watching.events();
    // A backup is restored, and others write: the same revisions now mean other values.
    world.rewind(before);
    world.put("/rooms/a/meta", "3");
    sleep(ms(1_000)).await;
    assert_eq!(watching.get("a").unwrap().meta, Some(3));
    assert_eq!(ids(&watching), ["a"]);
    let lines: Vec<_> =
        hand.lines().iter().map(|l| l.split_once(' ').unwrap().1.to_owned()).collect();
    assert_eq!(lines, ["rebuild a at 3", "a: 3 -", "b: gone"]);
    let went_back = WatcherEvent::WentBack { seen: revision, revision: Revision(3) };
    assert!(std::iter::from_fn(|| events.try_recv().ok()).any(|event| event == went_back));
}

#[tokio::test(start_paused = true)]
async fn a_list_compacted_between_two_pages_starts_again() {
    let world = World::new();
    for id in ["a", "b", "c", "d", "e"] {
        world.put(format!("/rooms/{id}/meta"), "1");
    }
    world.compact_after_pages(1);
    let hand = Hand::default();
    let watching = rooms().start(world.clone(), hand.clone());
    watching.ready(PATIENCE).await.unwrap();
    assert_eq!(ids(&watching), ["a", "b", "c", "d", "e"]);
    assert_eq!(world.lists(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_rebuild_waits_for_what_runs_and_what_is_due_waits_for_the_rebuild() {
    let world = World::new();
    let (_watching, hand) = watching(rooms(), &world).await;
    hand.will("a", [Does::Take(500)]);
    world.put("/rooms/a/meta", "1");
    sleep(ms(1)).await;
    world.blink();
    sleep(ms(200)).await;
    hand.rebuild_will([Does::Take(300)]);
    world.put("/rooms/b/meta", "1");
    sleep(ms(2_000)).await;
    let story = ["0 a: 1 -", "500 a ended", "500 rebuild a b at 3", "800 b: 1 -"];
    assert_eq!(hand.lines(), story);
}

#[tokio::test(start_paused = true)]
async fn a_restart_lists_rebuilds_and_reconciles_everything() {
    let world = World::new();
    world.put("/rooms/a/meta", "1");
    let (watching, hand) = watching(rooms(), &world).await;
    watching.restart().await;
    sleep(ms(1)).await;
    assert_eq!(hand.lines(), ["0 rebuild a at 2", "0 a: 1 -"]);
    assert_eq!(world.lists(), 2);
}

// W7: what is wrong stays out and stays visible.

#[tokio::test(start_paused = true)]
async fn malformed_keys_and_other_key_types_are_left_out_and_counted() {
    let world = World::new();
    for key in ["/rooms/", "/rooms/a", "/rooms//meta", "/rooms/a/"] {
        world.put(key, "1");
    }
    let (watching, hand) = watching(rooms(), &world).await;
    assert_eq!(watching.status().malformed, 4);
    world.put(b"/rooms/a/\xff", "1"); // a key type is text
    world.put("/rooms/a/unheard-of", "1"); // well formed, not ours
    world.put("/rooms/b/meta", "1");
    sleep(ms(1)).await;
    assert_eq!(hand.lines(), ["0 b: 1 -"]);
    assert_eq!(watching.status().malformed, 5);
    assert_eq!(ids(&watching), ["b"]);
}

#[tokio::test(start_paused = true)]
async fn a_value_that_cannot_be_read_leaves_the_last_good_state_and_says_so() {
    let world = World::new();
    world.put("/rooms/a/meta", "1");
    let (watching, hand) = watching(rooms(), &world).await;
    world.put("/rooms/a/meta", "what?");
    sleep(ms(1)).await;
    assert_eq!(watching.get("a").unwrap().meta, Some(1));
    assert_eq!(watching.status().unreadable, 1);
    let troubles = watching.troubles(9);
    assert_eq!(troubles[0].0.to_string(), "a");
    assert_eq!(
        troubles[0].1.unreadable,
        [("meta".to_owned(), "invalid digit found in string".to_owned())]
    );
    assert_eq!(hand.lines(), [""; 0], "nothing changed that could be read");

    world.put("/rooms/a/mixer", "m1"); // the id is not frozen
    sleep(ms(1)).await;
    world.put("/rooms/a/meta", "2");
    sleep(ms(1)).await;
    assert_eq!(hand.lines(), ["1 a: 1 m1", "2 a: 2 m1"]);
    assert_eq!(watching.troubles(9), []);
}

#[tokio::test(start_paused = true)]
async fn an_id_of_which_nothing_can_be_read_is_neither_reconciled_nor_an_orphan() {
    struct Looks(Arc<Mutex<Vec<(bool, bool)>>>);
    impl Reconcile for Looks {
        type State = Room;
        async fn rebuild(&self, wanted: &Wanted<Room>) -> Result<(), BoxError> {
            self.0.lock().push((wanted.contains(b"a"), wanted.get(b"a").is_some()));
            Ok(())
        }
        async fn reconcile(&self, id: &Id, _: Option<&Room>) -> Result<Next, BoxError> {
            panic!("{id} cannot be reconciled");
        }
    }
    let (world, looks) = (World::new(), Arc::default());
    world.put("/rooms/a/meta", "what?");
    let watching = rooms().start(world.clone(), Looks(Arc::clone(&looks)));
    watching.ready(PATIENCE).await.unwrap();
    watching.resync().await;
    sleep(ms(1_000)).await;
    assert_eq!(*looks.lock(), [(true, false)]);
    assert_eq!(watching.status().failed, 0);
}

#[tokio::test(start_paused = true)]
async fn an_id_that_was_never_read_whole_waits_until_it_can_be() {
    let world = World::new();
    world.put("/rooms/a/meta", "what?"); // it may have been good before we came
    world.put("/rooms/a/mixer", "m1");
    world.put("/rooms/b/meta", "1");
    let (watching, hand) = watching(rooms(), &world).await;
    watching.resync().await;
    sleep(ms(1)).await;
    assert_eq!(hand.lines(), ["0 b: 1 -"]);
    world.put("/rooms/a/mixer", "m2");
    world.put("/rooms/b/mixer", b"\xff"); // this one was never there before: it stays out
    world.put("/rooms/b/meta", "2");
    sleep(ms(1)).await;
    assert_eq!(hand.lines(), ["1 b: 2 -"], "a is not torn down for a value that cannot be read");
    let all = watching.all();
    assert!(all.contains(b"a") && all.get(b"a").is_none() && watching.get("a").is_none());
    world.put("/rooms/a/meta", "3");
    sleep(ms(1)).await;
    assert_eq!(hand.lines(), ["2 a: 3 m2"]);
}

#[tokio::test(start_paused = true)]
async fn ids_may_have_any_bytes() {
    let world = World::new();
    let (watching, hand) = watching(Watcher::new("/rooms/"), &world).await;
    for id in [&b"a/b"[..], b"/", b"//", b"\xff\xfe", b"\0", b" ", "ö".as_bytes()] {
        world.put([b"/rooms/", id, b"/meta"].concat(), "1");
        sleep(ms(1)).await;
        assert_eq!(watching.get(id).unwrap().meta, Some(1), "{id:?}");
        world.delete([b"/rooms/", id, b"/meta"].concat());
        sleep(ms(1)).await;
        assert_eq!(watching.get(id), None);
        assert_eq!(hand.lines().len(), 2, "{id:?}");
    }
    assert_eq!(watching.status().ids, 0, "nothing stays of what is gone");
}

// W8 and beyond: typed, parallel, isolated.

#[tokio::test(start_paused = true)]
async fn a_transaction_over_several_key_types_is_seen_whole() {
    let world = World::new();
    let (_watching, hand) = watching(rooms(), &world).await;
    world.write([
        (&b"/rooms/a/meta"[..], Some(&b"1"[..])),
        (b"/rooms/a/mixer", Some(b"m1")),
        (b"/rooms/b/meta", Some(b"2")),
    ]);
    sleep(ms(1)).await;
    assert_eq!(hand.lines(), ["0 a: 1 m1", "0 b: 2 -"]);
    world.write([(&b"/rooms/a/meta"[..], None), (b"/rooms/a/mixer", Some(&b"m2"[..]))]);
    sleep(ms(1)).await;
    assert_eq!(hand.lines(), ["1 a: - m2"]);
}

#[tokio::test(start_paused = true)]
async fn ids_run_beside_each_other_up_to_the_limit_and_one_id_only_once() {
    let world = World::new();
    let two = rooms().parallel(NonZeroU32::new(2).unwrap());
    let (_watching, hand) = watching(two, &world).await;
    for id in ["a", "b", "c"] {
        hand.will(id, [Does::Take(100)]);
        world.put(format!("/rooms/{id}/meta"), "1");
    }
    sleep(ms(50)).await;
    world.put("/rooms/a/meta", "2");
    world.put("/rooms/a/meta", "3"); // two changes while it runs: one more run
    sleep(ms(1_000)).await;
    let story = [
        "0 a: 1 -",
        "0 b: 1 -",
        "100 a ended",
        "100 b ended",
        "100 c: 1 -",
        "100 a: 3 -",
        "200 c ended",
    ];
    assert_eq!(hand.lines(), story);
}

#[tokio::test(start_paused = true)]
async fn a_handler_that_hangs_or_panics_is_a_failure_of_its_id_alone() {
    let world = World::new();
    let (watching, hand) = watching(rooms().timeout(Some(ms(5_000))), &world).await;
    let mut events = watching.events();
    hand.will("a", [Does::Hang]);
    hand.will("b", [Does::Panic]);
    world.put("/rooms/a/meta", "1");
    world.put("/rooms/b/meta", "1");
    sleep(ms(1)).await;
    world.put("/rooms/c/meta", "1");
    sleep(ms(6_000)).await;
    let story = ["0 a: 1 -", "0 b: 1 -", "1 c: 1 -", "100 b: 1 -", "5100 a: 1 -"];
    assert_eq!(hand.lines(), story);
    let mut failures = Vec::new();
    while let Ok(event) = events.try_recv() {
        if let WatcherEvent::Run(id, RunEvent::Failed { why, .. }) = event {
            failures.push((id.to_string(), why));
        }
    }
    let expected = [
        ("b".to_owned(), Failure::Panic("not at all".into())),
        ("a".to_owned(), Failure::Timeout(ms(5_000))),
    ];
    assert_eq!(failures, expected);
}

#[tokio::test(start_paused = true)]
async fn a_resync_reconciles_every_id_once_and_a_period_spreads_them() {
    let world = World::new();
    for id in ["a", "b"] {
        world.put(format!("/rooms/{id}/meta"), "1");
    }
    let (watching, hand) = watching(rooms(), &world).await;
    watching.resync().await;
    sleep(ms(100_000)).await;
    assert_eq!(hand.lines(), ["0 a: 1 -", "0 b: 1 -"], "and never by itself");
    drop(watching);

    let (_watching, hand) = self::watching(rooms().resync_every(ms(1_000)), &world).await;
    sleep(ms(2_998)).await;
    let story = ["999 a: 1 -", "1499 b: 1 -", "1999 a: 1 -", "2499 b: 1 -"];
    assert_eq!(hand.lines(), story);
}

#[tokio::test(start_paused = true)]
async fn a_feed_that_never_pauses_holds_up_neither_the_rebuild_nor_runs() {
    /// Has a change at hand whenever it is asked.
    struct Endless;
    struct Flood(u64);
    impl Source for Endless {
        type Feed = Flood;
        async fn list(&self, _: KeyRange, _: Option<Revision>) -> Result<Page, SourceError> {
            Ok(Page { revision: Revision(1), ..Page::default() })
        }
        async fn follow(&self, _: KeyRange, _: Revision) -> Result<(Flood, Revision), SourceError> {
            Ok((Flood(1), Revision(1)))
        }
    }
    impl Feed for Flood {
        async fn next(&mut self) -> Result<Changes, SourceError> {
            self.0 += 1;
            let (key, value) = (Bytes::from_static(b"/rooms/a/meta"), self.0.to_string());
            let change = Change { key, value: Some(value.into()), revision: Revision(self.0) };
            Ok(Changes { changes: vec![change], revision: Revision(self.0) })
        }
    }
    let hand = Hand::default();
    let watching = rooms().start(Endless, hand.clone());
    for look in 0.. {
        if hand.lines().iter().any(|line| line.contains("a:")) {
            break;
        }
        assert!(look < 10_000, "nothing runs");
        tokio::task::yield_now().await;
    }
    watching.stop(ms(0)).await;
}

#[tokio::test(start_paused = true)]
async fn what_ends_while_it_stops_is_told_and_a_rebuild_has_its_grace_too() {
    let world = World::new();
    let (watching, hand) = watching(rooms(), &world).await;
    let (mut events, handle) = (watching.events(), watching.handle());
    hand.will("a", [Does::Take(100)]);
    hand.will("b", [Does::Hang]);
    world.put("/rooms/a/meta", "1");
    world.put("/rooms/b/meta", "1");
    sleep(ms(1)).await;
    watching.stop(ms(500)).await;
    let mut ends = Vec::new();
    while let Ok(event) = events.try_recv() {
        match event {
            WatcherEvent::Run(id, RunEvent::Done { .. }) => ends.push(format!("{id} done")),
            WatcherEvent::Run(id, RunEvent::Cancelled) => ends.push(format!("{id} cancelled")),
            _ => {}
        }
    }
    assert_eq!(ends, ["a done", "b cancelled"]);
    let status = handle.status();
    assert_eq!((status.phase, status.running, status.done), (Phase::Stopped, 0, 1));
    assert!(!handle.resync().await, "it says that it has stopped");

    let hand = Hand::default();
    hand.rebuild_will([Does::Take(100)]);
    let watching = rooms().start(World::new(), hand.clone());
    sleep(ms(1)).await;
    let began = Instant::now();
    assert_eq!(watching.stop(ms(500)).await, 0);
    assert_eq!(began.elapsed(), ms(99));
}

#[tokio::test(start_paused = true)]
async fn a_stop_lets_runs_finish_within_the_grace_and_a_dropped_watcher_ends_them() {
    let world = World::new();
    let (watching, hand) = watching(rooms(), &world).await;
    hand.will("a", [Does::Take(100)]);
    hand.will("b", [Does::Hang]);
    world.put("/rooms/a/meta", "1");
    world.put("/rooms/b/meta", "1");
    sleep(ms(1)).await;
    world.put("/rooms/a/meta", "2");
    assert_eq!(watching.stop(ms(500)).await, 1, "one did not finish");
    world.put("/rooms/c/meta", "1");
    sleep(ms(1_000)).await;
    assert_eq!(hand.lines(), ["0 a: 1 -", "0 b: 1 -", "100 a ended"]);

    let (watching, hand) = self::watching(rooms(), &world).await;
    hand.will("a", [Does::Take(100)]);
    world.put("/rooms/a/meta", "3");
    sleep(ms(1)).await;
    drop(watching);
    sleep(ms(1_000)).await;
    assert_eq!(hand.lines(), ["0 a: 3 -"]);
}
