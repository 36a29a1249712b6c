//! What a watcher promises, at whatever place.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use testing::{PATIENCE, soon};
use vedetta_core::{KeyRange, Page, Revision, Source, SourceError};
use vedetta_runtime::watcher::Phase;

use super::{
    Deed, Pen, Place, Room, Rooms, Stage, Write, all_is_whole, key, room, rooms, until, watcher,
};

/// All of it, one story after another.
pub(crate) async fn holds_at(place: &impl Place) {
    macro_rules! stories {
        ($($story:ident)*) => {$(
            eprintln!("{}", stringify!($story));
            $story(place).await;
        )*};
    }
    stories! {
        a_list_of_several_pages_builds_a_typed_cache
        a_watcher_that_is_not_ready_says_why
        what_runs_and_nobody_wants_is_ended_first
        puts_and_deletes_reach_the_cache_and_the_handler
        after_a_lost_line_it_goes_on_where_it_was
        what_was_deleted_and_compacted_while_it_was_away_is_seen_as_deleted
        a_compaction_between_two_pages_lists_again
        a_compaction_between_list_and_feed_lists_again
        changes_wait_for_the_rebuild_after_a_reconnect
        a_value_nobody_can_read_leaves_the_last_good_one
        keys_that_are_not_of_the_form_are_counted_and_passed_over
        a_transaction_is_seen_whole
        ids_may_hold_any_bytes
        a_restart_lists_rebuilds_and_reconciles_everything
        a_resync_reconciles_everything_and_lists_nothing
    }
}

async fn a_list_of_several_pages_builds_a_typed_cache<L: Place>(place: &L) {
    const PREFIX: &str = "/pages/";
    let pen = place.pen();
    let rooms = L::PAGE + 50;
    let specs = |ids: std::ops::Range<usize>| -> Vec<Write> {
        let put = |n: usize| (key(PREFIX, n.to_string(), "spec"), Some(n.to_string().into_bytes()));
        ids.map(put).collect()
    };
    for some in specs(0..rooms).chunks(128) {
        pen.write(some.to_vec()).await;
    }
    let stage = Stage::start(place, PREFIX);
    // While it lists, more comes: in the list or after it, but never nowhere.
    let last = pen.write(specs(rooms..rooms + 10)).await;
    stage.watching.ready(PATIENCE).await.unwrap();
    stage.seen(last).await;
    assert_eq!(stage.get("7"), Some(room(7, None)));
    assert_eq!(stage.watching.all().len(), rooms + 10);
    stage.settles().await;
    let status = stage.watching.status();
    assert_eq!((status.lists, status.malformed, status.unreadable), (1, 0, 0));
    assert!(status.revision >= last);
    stage.end().await;
}

async fn a_watcher_that_is_not_ready_says_why<L: Place>(place: &L) {
    place.cut();
    let stage = Stage::start(place, "/unready/");
    until("it has tried", || stage.watching.status().lost > 0).await;
    let why = stage.watching.ready(Duration::ZERO).await.unwrap_err();
    assert!(why.error.is_some(), "{why}");
    assert!(matches!(why.at, Phase::Listing | Phase::Waiting), "{why}");
    place.mend();
    stage.watching.ready(PATIENCE).await.unwrap();
    stage.end().await;
}

async fn what_runs_and_nobody_wants_is_ended_first<L: Place>(place: &L) {
    const PREFIX: &str = "/orphans/";
    place.pen().write(vec![(key(PREFIX, "wanted", "spec"), Some(b"1".into()))]).await;
    place.cut(); // so that what runs can be told before anything is listed
    let stage = Stage::start(place, PREFIX);
    stage.reality.holds("wanted", room(1, None));
    stage.reality.holds("orphan", room(1, None));
    place.mend();
    stage.watching.ready(PATIENCE).await.unwrap();
    let wanted = Rooms::from([("wanted".into(), room(1, None))]);
    assert_eq!(stage.reality.rooms(), wanted);
    assert_eq!(stage.reality.deeds()[0], Deed::Rebuild(wanted));
    stage.settles().await;
    stage.end().await;
}

async fn puts_and_deletes_reach_the_cache_and_the_handler<L: Place>(place: &L) {
    let stage = Stage::ready(place, "/changes/").await;
    for number in 1..=3 {
        stage.put_seen("a", "spec", number).await;
        assert_eq!(stage.get("a"), Some(room(number, None)));
        stage.put_seen("b", "spec", number).await;
    }
    stage.put_seen("a", "link", 9).await;
    assert_eq!(stage.get("a"), Some(room(3, 9)));
    stage.settles().await;

    stage.seen(stage.delete("a", "spec").await).await;
    assert_eq!(stage.get("a"), Some(room(None, 9)));
    stage.seen(stage.delete("a", "link").await).await;
    assert_eq!(stage.get("a"), None);
    stage.settles().await;
    assert_eq!(stage.reality.rooms(), Rooms::from([("b".into(), room(3, None))]));
    assert!(stage.reality.deeds().contains(&Deed::Reconcile("a".into(), None)));

    stage.put_seen("a", "spec", 4).await; // one that was gone
    stage.settles().await;
    assert_eq!(stage.watching.status().lists, 1);
    stage.end().await;
}

async fn after_a_lost_line_it_goes_on_where_it_was<L: Place>(place: &L) {
    let stage = Stage::ready(place, "/lost/").await;
    for id in ["a", "b", "c"] {
        stage.put(id, "spec", 1).await;
    }
    stage.settles().await;
    stage.reality.take_deeds();

    stage.loses_its_line(async || place.cut()).await;
    stage.put("a", "spec", 2).await;
    stage.delete("b", "spec").await;
    stage.delete("c", "spec").await;
    stage.put("c", "link", 2).await;
    stage.put("d", "spec", 2).await;
    place.mend();
    stage.settles().await;
    let deeds = stage.reality.deeds();
    assert!(matches!(deeds[0], Deed::Rebuild(_)), "{deeds:?}");
    assert!(deeds.contains(&Deed::Reconcile("b".into(), None)));
    assert_eq!(stage.watching.status().lists, 1, "all of it was in the history");
    stage.end().await;
}

async fn what_was_deleted_and_compacted_while_it_was_away_is_seen_as_deleted<L: Place>(place: &L) {
    let stage = Stage::ready(place, "/away/").await;
    for id in ["kept", "changed", "deleted", "again", "half"] {
        stage.put(id, "spec", 1).await;
    }
    stage.put("half", "link", 1).await;
    stage.settles().await;
    stage.reality.take_deeds();

    stage.loses_its_line(async || place.cut()).await;
    stage.put("changed", "spec", 2).await;
    stage.delete("deleted", "spec").await;
    stage.delete("again", "spec").await;
    stage.put("again", "spec", 2).await;
    stage.delete("half", "link").await;
    stage.put("brief", "spec", 2).await;
    stage.delete("brief", "spec").await;
    stage.put("new", "spec", 2).await;
    stage.pen.compact().await;
    place.mend();
    stage.settles().await;
    assert_eq!(stage.watching.status().lists, 2);
    assert_eq!(stage.get("deleted"), None);

    // A feed may be open for a moment before it is known that its history is gone.
    let deeds = stage.reality.deeds();
    let rebuilds = deeds.iter().take_while(|deed| matches!(deed, Deed::Rebuild(_)));
    assert_eq!(rebuilds.last(), Some(&Deed::Rebuild(stage.reality.rooms())), "{deeds:?}");
    assert!(deeds.contains(&Deed::Reconcile("deleted".into(), None)));
    for id in ["kept", "brief"] {
        assert_eq!(stage.reality.runs(id.as_bytes()), 0, "{id} is as it was");
    }
    stage.end().await;
}

async fn a_compaction_between_two_pages_lists_again<L: Place>(place: &L) {
    const PREFIX: &str = "/between-pages/";
    for some in (0..=L::PAGE).collect::<Vec<_>>().chunks(128) {
        let put = |n: &usize| (key(PREFIX, n.to_string(), "spec"), Some(b"1".to_vec()));
        place.pen().write(some.iter().map(put).collect()).await;
    }
    let source = Interrupted::new(place, PREFIX, Before::SecondPage);
    let stage = Stage::start_with(place.pen().clone(), watcher(PREFIX), source, PREFIX);
    stage.watching.ready(PATIENCE).await.unwrap();
    assert_eq!(stage.get("0"), None, "deleted before it could be listed whole");
    stage.settles().await;
    assert_eq!(stage.watching.status().lists, 1, "half a list is none");
    stage.end().await;
}

async fn a_compaction_between_list_and_feed_lists_again<L: Place>(place: &L) {
    const PREFIX: &str = "/between-list-and-feed/";
    for id in ["0", "1"] {
        place.pen().write(vec![(key(PREFIX, id, "spec"), Some(b"1".to_vec()))]).await;
    }
    let source = Interrupted::new(place, PREFIX, Before::Feed);
    let stage = Stage::start_with(place.pen().clone(), watcher(PREFIX), source, PREFIX);
    stage.settles().await;
    assert_eq!(stage.get("0"), None, "deleted before it was followed");
    assert_eq!(stage.watching.status().lists, 2);
    stage.end().await;
}

async fn changes_wait_for_the_rebuild_after_a_reconnect<L: Place>(place: &L) {
    let stage = Stage::ready(place, "/rebuild/").await;
    stage.put("a", "spec", 1).await;
    stage.settles().await;
    for (round, compacted) in [(2, false), (3, true)] {
        stage.reality.take_deeds();
        stage.reality.gate(false);
        stage.loses_its_line(async || place.cut()).await;
        stage.put("a", "spec", 0).await;
        stage.put("a", "spec", round).await;
        if compacted {
            stage.pen.compact().await;
        }
        place.mend();
        until("it rebuilds", || !stage.reality.deeds().is_empty()).await;
        stage.put_seen("b", "spec", round).await;
        // The cache is ahead, as it should be, and nothing is done about it yet.
        assert_eq!(stage.get("a"), Some(room(round, None)));
        let deeds = stage.reality.deeds();
        assert!(deeds.iter().all(|deed| matches!(deed, Deed::Rebuild(_))), "{deeds:?}");
        // Already the rebuild knew what had changed.
        let Some(Deed::Rebuild(known)) = deeds.first() else { unreachable!() };
        assert_eq!(known.get(&b"a"[..]), Some(&room(round, None)), "{deeds:?}");
        stage.reality.gate(true);
        stage.settles().await;
    }
    stage.end().await;
}

async fn a_value_nobody_can_read_leaves_the_last_good_one<L: Place>(place: &L) {
    let stage = Stage::ready(place, "/unreadable/").await;
    stage.put("a", "spec", 1).await;
    stage.put_seen("a", "link", 5).await;
    stage.settles().await;

    stage.put_seen("a", "spec", "one").await;
    stage.put_seen("x", "spec", "nothing of this one can be read").await;
    assert_eq!(stage.get("a"), Some(room(1, 5)));
    let is_as_expected = |stage: &Stage<L::Pen>, a: Room| {
        assert_eq!((stage.get("a"), stage.get("x")), (Some(a), None));
        assert!(stage.watching.all().contains(b"x"), "it is there, whatever it is");
        let mut troubles = stage.watching.troubles(9);
        troubles.sort_by(|one, other| one.0.cmp(&other.0));
        let told: Vec<_> =
            troubles.iter().map(|(id, trouble)| (id.as_bytes(), &trouble.unreadable[..])).collect();
        let [(b"a", [(a, why)]), (b"x", [(x, _)])] = &told[..] else { panic!("{told:?}") };
        assert_eq!((&a[..], &x[..]), ("spec", "spec"));
        assert!(why.contains("invalid digit"), "{why}");
    };
    is_as_expected(&stage, room(1, 5));
    assert_eq!(stage.watching.status().unreadable, 2);

    // Neither the id nor the others are frozen.
    stage.put_seen("a", "link", 6).await;
    stage.put_seen("b", "spec", 1).await;
    is_as_expected(&stage, room(1, 6));
    let good = Rooms::from([("a".into(), room(1, 6)), ("b".into(), room(1, None))]);
    until("the handler has what is good", || stage.reality.rooms() == good).await;

    // What stands, stands when all is listed again.
    stage.watching.restart().await;
    until("it lists again", || stage.watching.status().lists == 2).await;
    is_as_expected(&stage, room(1, 6));
    assert_eq!(stage.reality.runs(b"x"), 0, "nobody knows what it should be");

    stage.put_seen("a", "spec", 2).await;
    stage.seen(stage.delete("x", "spec").await).await;
    stage.settles().await;
    until("nothing is wrong any more", || stage.watching.troubles(9).is_empty()).await;
    stage.end().await;
}

async fn keys_that_are_not_of_the_form_are_counted_and_passed_over<L: Place>(place: &L) {
    const PREFIX: &str = "/malformed/";
    let malformed: Vec<Write> = [&b""[..], b"spec", b"/spec", b"a/", b"a/\xff"]
        .iter()
        .map(|rest| ([PREFIX.as_bytes(), rest].concat(), Some(b"1".to_vec())))
        .collect();
    let count = u64::try_from(malformed.len()).unwrap();
    place.pen().write(malformed.clone()).await;
    let stage = Stage::ready(place, PREFIX).await;
    assert_eq!(stage.watching.status().malformed, count);

    stage.pen.write(malformed.clone()).await;
    stage.put("a", "unheeded", "?").await;
    stage.put_seen("a", "spec", 1).await;
    assert_eq!(stage.watching.status().malformed, 2 * count);
    stage.settles().await;
    let gone = malformed.into_iter().map(|(key, _)| (key, None));
    stage.pen.write(gone.collect()).await;
    stage.seen(stage.delete("a", "spec").await).await;
    stage.settles().await;
    assert_eq!(stage.watching.all().len(), 0, "a key type that is not heeded makes no id");
    assert_eq!(stage.watching.troubles(9), []);
    stage.end().await;
}

async fn a_transaction_is_seen_whole<L: Place>(place: &L) {
    const TXNS: usize = 150;
    let stage = Stage::ready(place, "/whole/").await;
    let keys: Vec<_> = ["a", "b", "c"]
        .iter()
        .flat_map(|id| ["spec", "link"].map(|kind| stage.key(id, kind)))
        .collect();
    let pen = stage.pen.clone();
    let (looked, mut looks) = tokio::sync::watch::channel(0);
    let writer = tokio::spawn(async move {
        for number in 1..=TXNS {
            // Not all of it before the first look.
            let _ = looks.wait_for(|looks| looks * 10 >= number).await;
            let value = (number % 5 > 0).then(|| number.to_string().into_bytes());
            let all = keys.iter().map(|key| (key.clone(), value.clone()));
            pen.write(all.collect()).await;
            if number == TXNS / 2 {
                pen.compact().await;
            }
        }
    });
    let mut seen = BTreeSet::new();
    while !writer.is_finished() {
        let now = rooms(&stage.watching.all());
        let values: BTreeSet<_> = now.values().flat_map(|room| [room.spec, room.link]).collect();
        assert!(now.is_empty() || now.len() == 3 && values.len() == 1, "{now:?}");
        // In the middle the line drops.
        if seen.insert(values) && seen.len() == 3 {
            stage.loses_its_line(async || place.cut()).await;
            place.mend();
        }
        looked.send_modify(|looks| *looks += 1);
        tokio::time::sleep(Duration::from_micros(200)).await;
    }
    writer.await.unwrap();
    stage.settles().await;
    assert!(seen.len() >= 3, "changes were seen as they came");
    all_is_whole(&stage.reality.deeds());
    stage.end().await;
}

async fn ids_may_hold_any_bytes<L: Place>(place: &L) {
    let stage = Stage::ready(place, "/bytes/").await;
    let long = [b'l'; 1000];
    let mut ids: Vec<&[u8]> =
        vec![b"/", b"//", b"a/b", b"a", b"\0", b"\xff\xfe", b" ", b"\n", &long];
    let every: Vec<u8> = (0..=255).collect();
    ids.push(&every);
    ids.extend(every.chunks(1).filter(|byte| !b"/a\0 \n".contains(&byte[0])).take(100));
    let puts = |value: Option<&[u8]>| -> Vec<Write> {
        ids.iter().map(|id| (stage.key(id, "spec"), value.map(<[u8]>::to_vec))).collect()
    };
    stage.seen(stage.pen.write(puts(Some(b"1"))).await).await;
    let cached = rooms(&stage.watching.all());
    assert_eq!(cached.len(), ids.len());
    assert!(ids.iter().all(|id| cached.contains_key(*id)), "{cached:?}");
    stage.settles().await;

    stage.watching.restart().await;
    until("it lists again", || stage.watching.status().lists == 2).await;
    stage.seen(stage.pen.write(puts(Some(b"2"))).await).await;
    stage.settles().await;
    stage.pen.write(puts(None)).await;
    stage.settles().await;
    until("all is forgotten", || stage.watching.status().ids == 0).await;
    stage.end().await;
}

async fn a_restart_lists_rebuilds_and_reconciles_everything<L: Place>(place: &L) {
    let stage = Stage::ready(place, "/restart/").await;
    for id in ["a", "b"] {
        stage.put(id, "spec", 1).await;
    }
    stage.settles().await;
    stage.reality.take_deeds();
    stage.watching.restart().await;
    let is_reconciled = || ["a", "b"].iter().all(|id| stage.reality.runs(id.as_bytes()) > 0);
    until("every id is reconciled", is_reconciled).await;
    assert!(matches!(stage.reality.deeds()[0], Deed::Rebuild(_)));
    assert_eq!(stage.watching.status().lists, 2);
    stage.put("a", "spec", 2).await;
    stage.settles().await;
    stage.end().await;
}

async fn a_resync_reconciles_everything_and_lists_nothing<L: Place>(place: &L) {
    const PREFIX: &str = "/resync/";
    let stage = Stage::ready(place, PREFIX).await;
    for id in ["a", "b"] {
        stage.put(id, "spec", 1).await;
    }
    stage.settles().await;
    stage.reality.take_deeds();
    stage.watching.resync().await;
    let runs = |stage: &Stage<L::Pen>, times| {
        ["a", "b"].iter().all(|id| stage.reality.runs(id.as_bytes()) >= times)
    };
    until("every id is reconciled", || runs(&stage, 1)).await;
    assert_eq!(stage.watching.status().lists, 1);
    stage.end().await;

    let often = watcher(PREFIX).resync_every(Duration::from_millis(50));
    let stage = Stage::start_with(place.pen().clone(), often, place.source(), PREFIX);
    until("every id is reconciled again and again", || runs(&stage, 3)).await;
    assert_eq!(stage.watching.status().lists, 1);
    stage.end().await;
}

/// A source where once, just before something is asked of it, `0` is deleted and all history goes.
struct Interrupted<S, P> {
    source: S,
    pen: P,
    prefix: &'static str,
    before: Before,
    done: Arc<AtomicBool>,
}

#[derive(PartialEq)]
enum Before {
    SecondPage,
    Feed,
}

impl<S, P: Pen> Interrupted<S, P> {
    fn new<L: Place<Source = S, Pen = P>>(place: &L, prefix: &'static str, before: Before) -> Self {
        let (source, pen) = (place.source(), place.pen().clone());
        Self { source, pen, prefix, before, done: Arc::default() }
    }

    async fn interrupt(&self, is_now: bool) {
        if is_now && !self.done.swap(true, Ordering::Relaxed) {
            self.pen.write(vec![(key(self.prefix, "0", "spec"), None)]).await;
            self.pen.write(vec![(key(self.prefix, "new", "spec"), Some(b"1".to_vec()))]).await;
            self.pen.compact().await;
        }
    }
}

impl<S: Source, P: Pen> Source for Interrupted<S, P> {
    type Feed = S::Feed;

    async fn list(&self, range: KeyRange, at: Option<Revision>) -> Result<Page, SourceError> {
        self.interrupt(self.before == Before::SecondPage && at.is_some()).await;
        self.source.list(range, at).await
    }

    async fn follow(
        &self,
        range: KeyRange,
        from: Revision,
    ) -> Result<(S::Feed, Revision), SourceError> {
        self.interrupt(self.before == Before::Feed).await;
        soon("a feed opens", self.source.follow(range, from)).await
    }
}
