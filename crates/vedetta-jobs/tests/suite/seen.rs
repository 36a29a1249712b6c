//! What is seen of a worker where a ledger is kept.

use std::sync::Arc;
use std::time::Duration;

use vedetta_core::JobState::{Cancelled, Dead, Done, Running};
use vedetta_jobs::{BoxError, Change, Jobs, Json, Ledger as _, NewJob, Outcome, Work, Worker};
use vedetta_runtime::Command;

use super::{Ask as _, AskLedger as _, LedgerWorld, QUEUE, eventually, json};

const FAR: Duration = Duration::from_secs(3600);

fn start<W: LedgerWorld>(world: &W, worker: Worker) -> vedetta_jobs::Working {
    worker.start(Arc::clone(world.jobs()) as Arc<dyn Jobs>).expect("it is a worker")
}

pub async fn progress_and_log_are_seen_while_a_job_runs_and_after<W: LedgerWorld>() {
    let world = W::new().await;
    let (go, gate) = tokio::sync::watch::channel(false);
    let worker = Worker::new(QUEUE).name("anna").handler("pack", move |work: Work, (): ()| {
        let mut gate = gate.clone();
        async move {
            work.progress(0.5);
            work.message("half of it");
            work.log("first line");
            gate.wait_for(|open| *open).await?;
            work.log("last line");
            let result: Json = json(r#"{"boxes":3}"#);
            Ok::<_, BoxError>(result)
        }
    });
    let working = start(&world, worker);
    let id = world.add(NewJob::new("pack")).await;
    eventually("it is half done", async || world.job(id).await.progress > 0.4).await;
    let job = world.job(id).await;
    assert_eq!((job.status, job.worker.as_deref()), (Running, Some("anna")));
    assert_eq!((job.message.as_deref(), job.log.as_str()), (Some("half of it"), "first line\n"));
    go.send(true).unwrap();
    eventually("it is done", async || world.state(id).await == Done).await;
    let job = world.job(id).await;
    assert!(job.progress > 0.99, "{}", job.progress);
    assert_eq!(job.log, "first line\nlast line\n");
    assert_eq!(job.result.map(|result| result.get().to_owned()).as_deref(), Some(r#"{"boxes":3}"#));
    working.stop(Duration::ZERO).await;
}

/// A flag that is up as long as something lives.
struct Lives(tokio::sync::watch::Sender<bool>);

impl Drop for Lives {
    fn drop(&mut self) {
        self.0.send_replace(false);
    }
}

pub async fn a_job_that_is_called_off_is_ended<W: LedgerWorld>() {
    let world = W::new().await;
    let lives = tokio::sync::watch::Sender::new(false);
    let mut seen = lives.subscribe();
    let worker = Worker::new(QUEUE).handler("pack", move |_: Work, (): ()| {
        let lives = Lives(lives.clone());
        async move {
            lives.0.send_replace(true);
            tokio::time::sleep(FAR).await;
            drop(lives);
            Ok::<_, BoxError>(())
        }
    });
    let working = start(&world, worker);
    let id = world.add(NewJob::new("pack")).await;
    testing::soon("it runs", seen.wait_for(|lives| *lives)).await.unwrap();
    assert_eq!(world.jobs().cancel(id).await.unwrap(), Change::Made);
    testing::soon("it is ended", seen.wait_for(|lives| !*lives)).await.unwrap();
    assert_eq!(world.state(id).await, Cancelled);
    eventually("nothing runs", async || working.status().running == 0).await;
    assert_eq!(world.state(id).await, Cancelled);
}

pub async fn a_failure_is_told_with_its_reason_and_counted<W: LedgerWorld>() {
    let world = W::new().await;
    let worker = Worker::new(QUEUE)
        .handler("fails", |_: Work, (): ()| async {
            Err::<(), _>(std::io::Error::other("no stock"))
        })
        .handler("panics", |_: Work, (): ()| async {
            let plan: Option<()> = None;
            assert!(plan.is_some(), "no plan");
            Ok::<_, BoxError>(())
        })
        .handler("hangs", |_: Work, (): ()| async {
            tokio::time::sleep(FAR).await;
            Ok::<_, BoxError>(())
        })
        .handler("refuses", |_: Work, (): ()| async {
            Ok::<_, BoxError>(Outcome::Dead("never".into()))
        });
    let _working = start(&world, worker);
    for (kind, why) in [
        ("fails", "no stock"),
        ("panics", "it panicked: no plan"),
        ("hangs", "it took longer than 50ms"),
        ("refuses", "never"),
        ("unknown", "no handler for jobs of the kind \"unknown\""),
    ] {
        let mut job = NewJob::new(kind);
        job.max_attempts = 1;
        job.timeout = Some(Duration::from_millis(50)).filter(|_| kind == "hangs");
        let id = world.add(job).await;
        eventually("it is dead", async || world.state(id).await == Dead).await;
        let job = world.job(id).await;
        assert_eq!(job.attempts, 1, "{kind}");
        assert!(job.error.as_deref().is_some_and(|error| error.contains(why)), "{:?}", job.error);
    }
}

pub async fn a_command_is_a_handler<W: LedgerWorld>() {
    let world = W::new().await;
    let script = r#"
        read -r payload
        echo "got $payload as $VEDETTA_KIND, attempt $VEDETTA_ATTEMPT" >&2
        echo '{"progress": 0.25, "message": "begun"}'
        case $payload in
            *fail*) exit 3 ;;
            *hang*) for n in 1 2 3 4 5 6 7 8; do setsid sleep 3600 & echo $! >&2; done; wait ;;
        esac
        echo '{"result": {"slots": '"$VEDETTA_SLOTS"'}}'
    "#;
    let command = Command::new("sh", ["-c", script], FAR);
    let _working = start(&world, Worker::new(QUEUE).command("script", command));
    let ask = |payload: &str| {
        let mut job = NewJob::new("script").payload(&payload).expect("JSON");
        (job.cost, job.max_attempts) = (2, 1);
        job
    };
    let id = world.add(ask("work")).await;
    eventually("it is done", async || world.state(id).await == Done).await;
    let job = world.job(id).await;
    assert_eq!(job.log, "got \"work\" as script, attempt 1\n");
    assert!(job.result.is_some_and(|result| result.get().starts_with(r#"{"slots":"#)));
    assert_eq!(job.message.as_deref(), Some("begun"));

    let id = world.add(ask("fail")).await;
    eventually("it is dead", async || world.state(id).await == Dead).await;
    let error = world.job(id).await.error.unwrap_or_default();
    assert!(error.starts_with("it ended with exit code 3"), "{error}");

    let mut hangs = ask("hang");
    hangs.timeout = Some(Duration::from_millis(900));
    let id = world.add(hangs).await;
    eventually("it is dead", async || world.state(id).await == Dead).await;
    let job = world.job(id).await;
    let left = |pid: &&str| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"));
        stat.is_ok_and(|stat| !stat.contains(") Z "))
    };
    assert_eq!(job.log.lines().skip(1).filter(left).count(), 0, "its slots are free");
    assert_eq!(job.error.as_deref(), Some("it took longer than 900ms"));
}
