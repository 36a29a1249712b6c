//! Every page, dark and light, wide and narrow: nothing is complained of, nothing is out of reach.

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use testing::browser::Browser;
use vedetta_dashboard::Observed;
use vedetta_jobs::{
    BoxError, Ledger as _, NewJob, Outcome, QueueCounts, When, Work, Worker, Working,
};
use vedetta_kv::Put;
use vedetta_runtime::watcher::{Effect, Id};
use vedetta_runtime::{Next, Reconcile, State, Watcher};
use vedetta_stage::Records as _;
use vedetta_stage::sqlite::{self, Records};

use crate::support::Server;

/// Checks pages for what keeps people out; MPL-2.0, its licence is beside it.
const AXE: &str = include_str!("vendor/axe.min.js");

#[test]
fn what_checks_the_pages_is_as_it_was_published() {
    let hash = Sha256::digest(AXE).iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    });
    assert_eq!(hash, "20c09fe157a8a34a30e241aaa1fcdade657734f08ab379ecfbeb7d45cc46e878");
}

#[derive(Debug, Clone, Default)]
struct Any;

impl State for Any {
    fn apply(&mut self, _: &str, _: Option<&[u8]>) -> Result<Effect, BoxError> {
        Ok(Effect::Wanted)
    }
}

struct Fails;

impl Reconcile for Fails {
    type State = Any;

    async fn reconcile(&self, _: &Id, _: Option<&Any>) -> Result<Next, BoxError> {
        Err("no mixer is free".into())
    }
}

/// A worker of a queue: most jobs are quick, some fail, those called `film` take their time.
fn worker(jobs: &Arc<Observed>, queue: &str) -> Working {
    let quick = async |work: Work, _: Value| {
        tokio::time::sleep(Duration::from_millis(20 + work.id().0 % 7 * 30)).await;
        if work.id().0 % 11 == 3 {
            return Err(BoxError::from("smtp.example.org did not answer within 30 s"));
        }
        Ok(())
    };
    let film = async |work: Work, _: Value| {
        for step in 0..200_u8 {
            work.progress(f32::from(step) / 200.0);
            work.message(&format!("scene {step} of 200"));
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        Ok::<_, BoxError>(Outcome::Done(None))
    };
    let worker = Worker::new(queue).name(format!("{queue}-worker")).capacity(4.try_into().unwrap());
    let worker = ["email.send", "thumbnail.make", "report.write"]
        .into_iter()
        .fold(worker, |worker, kind| worker.handler(kind, quick));
    worker.handler("film.transcode", film).start(Arc::clone(jobs) as _).unwrap()
}

async fn ask(server: &Server, kind: &str, queue: &str, n: u64) {
    let body = json!({
        "kind": kind, "queue": queue, "max_attempts": 1, "tags": ["nightly"],
        "payload": { "to": format!("customer-{n}@example.org"), "template": "welcome" },
    });
    server.post("/jobs", body).await;
}

/// A supervisor and a worker of another process say that they are there; without more they are silent soon.
pub(crate) async fn beat(server: &Server) {
    let report = json!({"host": "web1", "version": "1", "instance": "a", "queues": ["mail", "media"],
        "balance": "auto", "min": 1, "max": 4, "wanted": 1, "state": "crash-looping", "last_exit": "exit code 1",
        "stderr": "Error: no licence for the encoder\n"});
    server.post("/supervisors/default:web1/beat", report).await;
    let beat = json!({"queues": ["mail", "media"], "supervisor": "default:web1", "pid": 4711, "host": "web1",
        "version": "1", "state": "running", "running": [3, 4], "slots": {"used": 2, "capacity": 4}, "done": []});
    server.post("/workers/default-1c9d7d0e/beat", beat).await;
}

/// A server with something of everything.
async fn lively()
-> (Server, Vec<Working>, tempfile::TempDir, vedetta_runtime::watcher::Watching<Any>) {
    let server = Server::start().await;
    let folder = tempfile::tempdir().unwrap();
    let options = vedetta_db::Options::new(folder.path().join("stages.db"));
    let records =
        Records::open(vedetta_db::Db::open(&options, &[sqlite::SCHEMA]).unwrap()).await.unwrap();
    for stage in ["payment", "packing", "shipping"] {
        let lane = records.lane("order", stage).await.unwrap();
        let visits = [("1", 0, Duration::ZERO), ("2", 0, Duration::from_secs(3600))];
        records.enqueue(lane, &visits).await.unwrap();
    }
    let watching = Watcher::new("/rooms/").key_types(["title"]).start(server.store.clone(), Fails);
    let jobs = Observed::alone(Arc::new(server.jobs.clone()));
    let shown = Arc::clone(&jobs);
    let server = server
        .serve_as(|api| api.observed(shown).stages(records).watcher("rooms", watching.handle()))
        .await;
    for n in 0..12 {
        server.store.put(Put::new(format!("/rooms/{n}/title"), format!("Room {n}"))).await.unwrap();
    }
    let workers = vec![worker(&jobs, "mail"), worker(&jobs, "media")];
    ask(&server, "film.transcode", "media", 1).await;
    ask(&server, "film.transcode", "media", 2).await;
    for n in 0..40 {
        ask(&server, "email.send", "mail", n).await;
    }
    let later =
        NewJob::new("report.write").queue("reports").when(When::After(Duration::from_secs(3600)));
    server.jobs_add(&[later]).await;
    server.post("/queues/reports/pause", json!({})).await;
    beat(&server).await;
    (server, workers, folder, watching)
}

impl Server {
    async fn jobs_add(&self, jobs: &[NewJob]) {
        vedetta_jobs::Jobs::enqueue(&self.jobs, jobs).await.unwrap();
    }
}

async fn violations(browser: &Browser) -> Vec<String> {
    browser.run(&format!("{AXE}; window.axe = axe;")).await;
    let script = "const [done] = arguments;
        const tags = ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'wcag22aa', 'best-practice'];
        axe.run({ runOnly: { type: 'tag', values: tags } }).then(({ violations }) => done(violations.map(
            ({ id, nodes }) => `${id}: ${nodes.slice(0, 3).map(({ html, failureSummary }) => html + ' ' + failureSummary).join(' | ')}`)));";
    let found = browser.client.execute_async(script, Vec::new()).await.unwrap();
    found
        .as_array()
        .unwrap()
        .iter()
        .map(|one| one.as_str().unwrap_or_default().to_owned())
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn every_page_is_complete_in_every_theme_and_width() {
    let (server, workers, _folder, watching) = lively().await;
    let browser = Browser::open().await;
    // One of them failed by now.
    browser.live(server.address, "/").await;
    let dead = loop {
        let list = server.get("/api/v1/jobs?status=dead&limit=1").await.json();
        if let Some(id) = list["jobs"][0]["id"].as_u64() {
            break id;
        }
        browser.find("#line").await;
    };
    let folder = std::env::var_os("VEDETTA_PICTURES").map(std::path::PathBuf::from);
    let (one, running) = (format!("/jobs/{dead}"), "/jobs/1".to_owned());
    let pages = [
        ("overview", "/"),
        ("jobs", "/jobs"),
        ("job", &one),
        ("running", &running),
        ("failed", "/failed"),
        ("queues", "/queues"),
        ("workers", "/workers"),
        ("stages", "/stages"),
        ("watchers", "/watchers"),
        ("kv", "/kv"),
        ("insights", "/insights"),
    ];
    let mut faults = Vec::new();
    for theme in ["dark", "light"] {
        browser.width(1280);
        browser.live(server.address, "/").await;
        browser.click(&format!("form.theme button[value={theme}]")).await;
        browser.find(&format!("html[data-theme={theme}]")).await;
        for width in [1280, 320] {
            browser.width(width);
            for (name, path) in pages {
                if name == "workers" {
                    beat(&server).await;
                }
                browser.live(server.address, path).await;
                if browser.run("return document.querySelector('[data-chart]') !== null").await
                    == true
                {
                    browser.find("[data-chart] canvas").await;
                }
                if name == "workers" {
                    for control in
                        ["tr[data-worker^=default-] form[action$='/pause']", "form.start"]
                    {
                        let seen = browser.find(control).await.is_displayed().await.unwrap();
                        assert!(seen, "{control} is there to be looked at");
                    }
                }
                let wide = browser.run("return document.documentElement.scrollWidth").await;
                if wide.as_u64() > Some(u64::from(width)) {
                    faults.push(format!("{name} is {wide} wide in {width}"));
                }
                let found = violations(&browser).await;
                faults.extend(found.iter().map(|fault| format!("{name} {theme} {width}: {fault}")));
                if let Some(folder) = &folder {
                    std::fs::write(
                        folder.join(format!("{name}-{theme}-{width}.png")),
                        browser.picture(width),
                    )
                    .unwrap();
                }
            }
        }
    }
    faults.extend(browser.complaints());
    browser.run("console.error('heard')").await;
    assert!(browser.complaints().concat().contains("heard"), "complaints are heard");
    assert!(faults.is_empty(), "{}", faults.join("\n"));
    drop(browser);
    for worker in workers {
        worker.stop(Duration::ZERO).await;
    }
    watching.stop(Duration::ZERO).await;
    server.end().await;
}

/// Makes the picture of README.md: some minutes of work, and then a look at it.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "writes docs/pictures/overview.png: cargo nextest run -p vedetta-dashboard --test browser --run-ignored only"]
async fn the_picture_of_the_overview_is_made() {
    let (server, workers, _folder, watching) = lively().await;
    let began = std::time::Instant::now();
    let mut n = 0;
    while began.elapsed() < Duration::from_secs(150) {
        let wave = 6 + began.elapsed().as_secs() / 10 % 5 * 3;
        for _ in 0..wave {
            n += 1;
            let (kind, queue) =
                [("email.send", "mail"), ("thumbnail.make", "media"), ("report.write", "mail")]
                    [usize::try_from(n % 3).unwrap()];
            ask(&server, kind, queue, n).await;
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    let browser = Browser::open().await;
    browser.width(1280);
    browser.live(server.address, "/").await;
    browser.click("form.theme button[value=dark]").await;
    browser.find("html[data-theme=dark]").await;
    browser.live(server.address, "/?range=5m").await;
    browser.find("[data-chart] canvas").await;
    for _ in 0..5 {
        ask(&server, "email.send", "mail", n).await;
        testing::soon("the mail is sent", async {
            let is_over =
                |queue: &QueueCounts| queue.name == "mail" && queue.ready + queue.running == 0;
            while !server.jobs.queues().await.unwrap().iter().any(is_over) {
                tokio::task::yield_now().await;
            }
        })
        .await;
    }
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/pictures");
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join("overview.png"), browser.picture(1280)).unwrap();
    drop(browser);
    for worker in workers {
        worker.stop(Duration::ZERO).await;
    }
    watching.stop(Duration::ZERO).await;
    server.end().await;
}
