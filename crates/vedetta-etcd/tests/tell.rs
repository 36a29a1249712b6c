//! Watchers that a program tells of, and the board on which they are seen.

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use support::{Ours, soon};
use testing::{Proxy, etcd};
use vedetta_core::{KeyRange, Source as _};
use vedetta_etcd::{Cluster, tell};
use vedetta_runtime::told::{Board, PREFIX, Told};
use vedetta_runtime::watcher::{BoxError, Effect, Id};
use vedetta_runtime::{Next, Reconcile, State, Watcher, Watching};

#[derive(Debug, Clone, Default)]
struct Text(String);

impl State for Text {
    fn apply(&mut self, _: &str, value: Option<&[u8]>) -> Result<Effect, BoxError> {
        self.0 = str::from_utf8(value.unwrap_or_default())?.into();
        Ok(Effect::Wanted)
    }
}

/// Counts its runs; `bad` will not do.
#[derive(Clone, Default)]
struct Runs(Arc<AtomicUsize>);

impl Reconcile for Runs {
    type State = Text;

    async fn reconcile(&self, _: &Id, text: Option<&Text>) -> Result<Next, BoxError> {
        self.0.fetch_add(1, Ordering::Relaxed);
        match text {
            Some(Text(text)) if text == "bad" => Err("x".repeat(100_000).into()),
            _ => Ok(Next::Done),
        }
    }
}

fn watch(cluster: &Cluster) -> (Watching<Text>, Runs) {
    let runs = Runs::default();
    (Watcher::new("/t/").start(cluster.clone(), runs.clone()), runs)
}

async fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    soon(what, async {
        loop {
            match look() {
                Some(found) => return found,
                None => tokio::time::sleep(Duration::from_millis(20)).await,
            }
        }
    })
    .await
}

/// What is told under a name, as soon as it is so.
async fn told(board: &Board, name: &str, is_so: impl Fn(&Told) -> bool) -> Arc<Told> {
    until(name, || board.find(name).map(|(_, told)| told).filter(|told| is_so(told))).await
}

fn names(board: &Board) -> Vec<String> {
    board.all().into_iter().map(|(name, _)| name).collect()
}

#[tokio::test]
async fn what_a_program_tells_of_its_watchers_is_on_every_board_until_it_ends() {
    let etcd = etcd::Cluster::start(3).await;
    let ours = Ours::start().await;
    for endpoints in [etcd.endpoints(), vec![ours.address.to_string()]] {
        let cluster = Cluster::new(endpoints).unwrap();
        let (board, reading) = Board::start(&cluster);
        let (watching, runs) = watch(&cluster);
        watching.ready(support::PATIENCE).await.unwrap();
        let telling = tell(&cluster, "texts", watching.handle());
        let first = told(&board, "texts", |told| told.report.phase == "following").await;
        assert_eq!(first.report.prefix.as_deref(), Some("/t/"));
        let plain = board.find("texts").unwrap().0;
        assert!(plain.starts_with("texts@") && plain.ends_with(&std::process::id().to_string()));

        // What changes is told, with what is wrong, and no more than a board can bear.
        cluster.put("/t/1/x", "good").await.unwrap();
        for n in 0..100 {
            cluster.put(format!("/t/bad{n}/x"), "bad").await.unwrap();
        }
        let told = told(&board, "texts", |told| told.report.failing == 100).await;
        assert_eq!(told.report.ids, 101);
        let trouble = &told.troubles[0];
        assert!(trouble.failures > 0 && trouble.error.as_ref().unwrap().starts_with("xxx"));
        let key = KeyRange::prefix(PREFIX);
        let page = cluster.list(key.clone(), None).await.unwrap();
        assert!(page.entries[0].value.len() <= vedetta_runtime::told::LARGEST);

        // Another of the same name does not hide it, nor is it found by half its name then.
        let (other, other_runs) = watch(&cluster);
        let also = tell(&cluster, "texts", other.handle());
        until("both", || (names(&board).len() == 2).then_some(())).await;
        assert_eq!(names(&board), [plain.clone(), format!("{plain}-2")]);
        assert!(board.find("texts").is_none() && board.find(&plain).is_some());

        // Nor does what nobody can read, nor a name that is none.
        let large = vec![b' '; 200_000];
        for (id, value) in [
            ("broken@there", &b"{"[..]),
            ("empty@there", b""),
            ("half@there", br#"{"phase":"following"}"#),
            ("large@there", &large),
            ("nameless", page.entries[0].value.as_ref()),
        ] {
            cluster.put(format!("{PREFIX}{id}/status"), value.to_vec()).await.unwrap();
        }
        cluster
            .put(format!("{PREFIX}x@there/status"), page.entries[0].value.clone())
            .await
            .unwrap();
        until("the last of them", || board.find("x")).await;
        assert_eq!(names(&board), [plain.clone(), format!("{plain}-2"), "x@there".into()]);

        // A wish is followed by the one it is for, and forgotten then.
        for n in 0..100 {
            cluster.delete(format!("/t/bad{n}/x")).await.unwrap();
        }
        until("all is well", || (other.status().failing == 0).then_some(())).await;
        until("all is well", || (watching.status().failing == 0).then_some(())).await;
        until("both are idle", || {
            (watching.status().waiting + other.status().waiting == 0).then_some(())
        })
        .await;
        let before = (runs.0.load(Ordering::Relaxed), other_runs.0.load(Ordering::Relaxed));
        board.resync(&format!("{plain}-2")).await.unwrap();
        until("it runs again", || (other_runs.0.load(Ordering::Relaxed) > before.1).then_some(()))
            .await;
        soon("the wish is forgotten", async {
            while cluster.get(format!("{PREFIX}{plain}-2/resync")).await.unwrap().is_some() {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        })
        .await;
        assert_eq!(runs.0.load(Ordering::Relaxed), before.0, "not this one");

        // One ends in good order, the other is dropped, and goes with its lease.
        telling.end().await;
        until("it is gone", || (!names(&board).contains(&plain)).then_some(())).await;
        drop(also);
        until("it is gone", || (names(&board) == ["x@there"]).then_some(())).await;
        reading.stop().await;
    }
}

#[tokio::test]
async fn what_is_told_comes_back_under_its_name_after_a_cut_longer_than_its_lease() {
    let ours = Ours::start().await;
    let proxy = Proxy::to(ours.address).await;
    let far = Cluster::new([proxy.address().to_string()]).unwrap();
    let far = far.patience(Duration::from_secs(2));
    let (board, _reading) = Board::start(&ours.store);
    let (watching, _) = watch(&far);
    let _telling = tell(&far, "texts", watching.handle());
    let name = until("it is told", || names(&board).pop()).await;
    proxy.cut();
    until("its lease ends", || board.all().is_empty().then_some(())).await;
    proxy.mend();
    assert_eq!(until("it is told again", || names(&board).pop()).await, name);
    assert_eq!(board.all().len(), 1);
    told(&board, "texts", |told| told.report.lost > 0 && told.report.phase == "following").await;
}
