//! Real videos, made by a real FFmpeg, on the embedded queue.

mod common;

use std::fs::{self, File};
use std::num::NonZeroU32;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use common::{QUEUE, Stage, alive, until};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use transcode::{Asked, Media, Place, Queue, Tools};
use vedetta::core::JobState;
use vedetta::dashboard::{self, Api};
use vedetta::db::Db;
use vedetta::jobs::sqlite::SqliteJobs;
use vedetta::jobs::{Change, Job, JobId, Ledger as _};
use vedetta::kv::Store;

/// Which resolutions were made, and which were there before.
fn made_and_kept(job: &Job) -> (Vec<String>, Vec<String>) {
    #[derive(serde::Deserialize)]
    struct Output {
        resolution: String,
        kept: bool,
    }
    let result = job.result.as_ref().expect("it is done").get();
    let outputs: Vec<Output> = serde_json::from_str(result).unwrap();
    let (kept, made): (Vec<_>, Vec<_>) = outputs.into_iter().partition(|output| output.kept);
    let names = |outputs: Vec<Output>| outputs.into_iter().map(|o| o.resolution).collect();
    (names(made), names(kept))
}

const OF_480P: [&str; 4] = ["480p", "360p", "240p", "144p"];

#[tokio::test]
async fn a_file_is_made_into_all_resolutions_up_to_its_own_and_what_is_good_is_not_made_again() {
    let stage = Stage::working();
    let film = stage.media("film.mp4", 480, 2).await;
    let studio = stage.start(15).await;
    let first = studio.add(&film, &[]).await;
    // 8 + 4 + 2 + 1: they run side by side, each with its threads.
    stage.until_running(4).await;
    assert_eq!(studio.working.slots(), (15, 15));
    let mut threads: Vec<u32> = stage.runs().iter().map(|run| run.threads).collect();
    threads.sort_unstable();
    assert_eq!(threads, [1, 2, 4, 8]);
    stage.open("film.mp4.480p.mp4");
    until("480p", || stage.running().len() == 3).await;
    let half = async {
        while studio.job(first).await.progress < 8.0 / 15.0 {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    testing::soon("progress", half).await;
    let job = studio.job(first).await;
    assert!(job.progress < 0.6, "{}", job.progress);
    assert_eq!(job.message.unwrap(), "runs 360p, 240p, 144p; done 480p");
    stage.open("all");

    let job = studio.done(first).await;
    assert!((job.progress - 1.0).abs() < f32::EPSILON);
    assert_eq!(made_and_kept(&job).0, OF_480P);
    assert!(job.log.contains("480p begins with 8 slots\n"), "{}", job.log);
    let outputs =
        ["film.mp4.144p.mp4", "film.mp4.240p.mp4", "film.mp4.360p.mp4", "film.mp4.480p.mp4"];
    assert_eq!(stage.media_folder(), [&["film.mp4"], &outputs[..]].concat());
    for (output, height) in outputs.iter().zip([144, 240, 360, 480]) {
        let media =
            Media::probe(&Tools::default(), &stage.path("media").join(output)).await.unwrap();
        assert_eq!(media.height, height);
        let duration = media.duration.unwrap().as_secs_f64();
        assert!((1.9..2.2).contains(&duration), "{output}: {duration}");
    }

    let job = studio.done(studio.add(&film, &[]).await).await;
    assert_eq!(made_and_kept(&job).1, OF_480P);
    // One that is broken, and one that is of something else.
    let output = |number: usize| stage.path("media").join(outputs[number]);
    File::options().write(true).open(output(0)).unwrap().set_len(1000).unwrap();
    fs::copy(output(1), output(2)).unwrap();
    let job = studio.done(studio.add(&film, &[]).await).await;
    assert_eq!(made_and_kept(&job).0, ["360p", "144p"]);
    // The file is another now.
    File::options().write(true).open(&film).unwrap().set_modified(SystemTime::now()).unwrap();
    let job = studio.done(studio.add(&film, &["360p", "1080p"]).await).await;
    assert_eq!(made_and_kept(&job), (vec!["360p".to_owned()], vec![]));
    assert_eq!(stage.media_folder().len(), 5);
}

#[tokio::test]
async fn while_ffmpeg_works_it_is_seen_how_far_it_is() {
    // As slow as the film is played.
    let stage = Stage::new(r#""$ffmpeg" -re "$@""#);
    stage.open("all");
    let film = stage.media("film.mp4", 144, 6).await;
    let studio = stage.start(1).await;
    let id = studio.add(&film, &["144p"]).await;
    let seen = async {
        loop {
            let job = studio.job(id).await;
            let has_ended = !matches!(job.status, JobState::Waiting | JobState::Running);
            assert!(!has_ended, "it ended, and nothing was seen of it: {job:#?}");
            if 0.0 < job.progress && job.progress < 1.0 {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    testing::soon("progress", seen).await;
    let job = studio.done(id).await;
    assert!((job.progress - 1.0).abs() < f32::EPSILON);
}

#[tokio::test]
async fn many_files_at_once_never_take_more_threads_than_there_are_slots() {
    let stage = Stage::working();
    stage.open("all");
    let studio = stage.start(6).await;
    let mut jobs = Vec::new();
    for (number, height) in [144, 360, 240, 480, 144, 240].into_iter().enumerate() {
        let film = stage.media(&format!("{number}.mp4"), height, 1).await;
        jobs.push(studio.add(&film, &[]).await);
    }
    for job in jobs {
        studio.done(job).await;
    }
    assert_eq!(stage.runs().len(), 1 + 3 + 2 + 4 + 1 + 2);
    // The one of 480p takes all.
    assert_eq!(stage.most_threads(), 6);
    assert_eq!(studio.working.slots(), (0, 6));
}

#[tokio::test]
async fn fourteen_small_jobs_run_at_once() {
    let stage = Stage::working();
    let studio = stage.start(14).await;
    let first = stage.media("0.mp4", 144, 1).await;
    let mut jobs = Vec::new();
    for number in 0..14 {
        let film = stage.path("media").join(format!("{number}.mp4"));
        if number > 0 {
            fs::copy(&first, &film).unwrap();
        }
        jobs.push(studio.add(&film, &[]).await);
    }
    stage.until_running(14).await;
    assert_eq!(studio.working.slots(), (14, 14));
    stage.open("all");
    for job in jobs {
        studio.done(job).await;
    }
    assert_eq!(stage.most_threads(), 14);
}

#[tokio::test]
async fn a_large_job_takes_the_whole_machine_and_ten_small_ones_run_after_it() {
    let stage = Stage::working();
    let studio = stage.start(14).await;
    let film = stage.media("film.mp4", 2160, 1).await;
    let large = studio.add(&film, &["2160p"]).await;
    stage.until_running(1).await;
    assert_eq!(stage.runs()[0].threads, 14);
    let small = stage.media("0.mp4", 144, 1).await;
    let mut jobs = Vec::new();
    for number in 0..10 {
        let film = stage.path("media").join(format!("{number}.mp4"));
        if number > 0 {
            fs::copy(&small, &film).unwrap();
        }
        jobs.push(studio.add(&film, &[]).await);
    }
    // No slot is free: they are left to others.
    assert_eq!(studio.working.status().flow.taken, 1);
    assert_eq!(stage.running(), ["film.mp4.2160p.mp4"]);
    stage.open("film.mp4.2160p.mp4");
    stage.until_running(10).await;
    assert_eq!(studio.working.slots(), (10, 14));
    studio.done(large).await;
    stage.open("all");
    for job in jobs {
        studio.done(job).await;
    }
    assert_eq!(stage.most_threads(), 14);
}

#[tokio::test]
async fn after_a_1080p_job_five_of_cost_four_run_as_three_and_two() {
    let stage = Stage::working();
    let studio = stage.start(14).await;
    let film = stage.media("film.mp4", 1080, 1).await;
    let large = studio.add(&film, &["1080p"]).await;
    stage.until_running(1).await;
    assert_eq!(stage.runs()[0].threads, 14);
    let first = stage.media("0.mp4", 360, 1).await;
    let mut jobs = Vec::new();
    for number in 0..5 {
        let film = stage.path("media").join(format!("{number}.mp4"));
        if number > 0 {
            fs::copy(&first, &film).unwrap();
        }
        jobs.push(studio.add(&film, &["360p"]).await);
    }
    assert_eq!(stage.running(), ["film.mp4.1080p.mp4"]);
    stage.open("film.mp4.1080p.mp4");
    studio.done(large).await;
    let three = stage.until_running(3).await;
    assert_eq!(studio.working.slots(), (12, 14));
    three.iter().for_each(|output| stage.open(output));
    until("the other two", || {
        let running = stage.running();
        running.len() == 2 && running.iter().all(|output| !three.contains(output))
    })
    .await;
    // FFmpeg has ended a little before the last look at what it made.
    until("their slots alone", || studio.working.slots() == (8, 14)).await;
    stage.open("all");
    for job in jobs {
        studio.done(job).await;
    }
    assert_eq!(stage.most_threads(), 14);
}

#[tokio::test]
async fn a_job_that_is_called_off_leaves_nothing_behind() {
    let stage = Stage::working();
    let film = stage.media("film.mp4", 240, 1).await;
    let studio = stage.start(14).await;
    let job = studio.add(&film, &[]).await;
    stage.until_running(2).await;
    assert_eq!(stage.media_folder().len(), 3, "two are begun");
    assert_eq!(studio.jobs.cancel(job).await.unwrap(), Change::Made);
    until("the end", || stage.runs().iter().all(|run| !alive(&run.pid))).await;
    until("clean", || stage.media_folder() == ["film.mp4"]).await;
    until("slots", || studio.working.slots().0 == 0).await;
    assert_eq!(studio.ended(job).await.status, JobState::Cancelled);
}

#[tokio::test]
async fn what_is_no_video_is_dead_at_once_and_says_why() {
    let stage = Stage::working();
    let studio = stage.start(2).await;
    let broken = stage.path("media").join("broken.mp4");
    fs::write(&broken, [7; 5000]).unwrap();
    let film = stage.media("film.mp4", 144, 1).await;
    let sound = stage.path("media").join("sound.wav");
    let made = Command::new("ffmpeg")
        .args(["-loglevel", "error", "-nostdin", "-f", "lavfi", "-i", "sine=duration=1"])
        .arg(&sound)
        .status();
    assert!(made.unwrap().success());
    let flat = stage.media("flat.mp4", 100, 1).await;
    // Nothing but files, whatever it looks like.
    let elsewhere = "http://127.0.0.1:9/film.mp4".as_ref();
    for (file, why) in [
        (&*broken, "Invalid data found"),
        (&stage.path("media").join("none.mp4"), "No such file or directory"),
        (&sound, "sound.wav: there is no video in it"),
        (&flat, "of 100 lines nothing can be made"),
        (elsewhere, "No such file or directory"),
    ] {
        let job = studio.ended(studio.add(file, &[]).await).await;
        assert_eq!((job.status, job.attempts), (JobState::Dead, 1), "{job:#?}");
        assert!(job.error.as_ref().unwrap().contains(why), "{:?}", job.error);
    }
    let asked_for_more = studio.ended(studio.add(&film, &["480p"]).await).await;
    assert_eq!((asked_for_more.status, asked_for_more.attempts), (JobState::Dead, 1));
    assert_eq!(stage.runs(), []);
}

#[tokio::test]
async fn an_ffmpeg_that_fails_is_tried_again_and_its_words_are_kept() {
    let does = r#"case $output in *144p*) echo first >&2; echo "no more disk" >&2; false ;; *) "$ffmpeg" "$@" ;; esac"#;
    let stage = Stage::new(does);
    stage.open("all");
    let film = stage.media("film.mp4", 240, 1).await;
    let studio = stage.start(2).await;
    let job = studio.ended(studio.add(&film, &[]).await).await;
    assert_eq!((job.status, job.attempts), (JobState::Dead, 2));
    let error = "144p: FFmpeg failed: it ended with exit code 1: first\nno more disk";
    assert_eq!(job.error.as_deref(), Some(error));
    assert!(job.log.contains("144p: no more disk\n"), "{}", job.log);
    // The other was made, and once.
    assert_eq!(stage.media_folder(), ["film.mp4", "film.mp4.240p.mp4"]);
    assert_eq!(stage.runs().iter().filter(|run| run.output.contains("240p")).count(), 1);
}

#[tokio::test]
async fn an_output_that_is_too_short_is_not_published() {
    // As after a signal: there is a file, and it can be played.
    let stage = Stage::new(r#""$ffmpeg" -t 0.5 "$@""#);
    stage.open("all");
    let film = stage.media("film.mp4", 144, 2).await;
    let studio = stage.start(2).await;
    let job = studio.ended(studio.add(&film, &[]).await).await;
    assert_eq!(job.status, JobState::Dead);
    let error = job.error.unwrap();
    assert!(error.starts_with("144p: what FFmpeg made is no good: it lasts 5"), "{error}");
    assert_eq!(stage.media_folder(), ["film.mp4"]);
    assert!(job.progress < 1.0);
}

fn place(stage: &Stage, queue: String) -> Place {
    Place {
        data: stage.path("data"),
        queue: Some(queue),
        stream: "BBMOVIE".into(),
        subject: "minio.events".into(),
        durable: "transcode-worker".into(),
        max_ack_pending: None,
        lease: None,
    }
}

#[tokio::test]
async fn the_same_worker_takes_the_messages_of_strangers_from_a_jetstream() {
    let stage = Stage::working();
    stage.open("all");
    let film = stage.media("film.mp4", 240, 1).await;
    let server = testing::nats::Server::start().await;
    let queue = Queue::open(&place(&stage, server.url())).await.unwrap();
    let stranger = async_nats::jetstream::new(async_nats::connect(server.url()).await.unwrap());
    for event in [
        format!(r#"{{"file": {film:?}, "bucket": "films"}}"#),
        format!(r#"{{"file": {:?}}}"#, stage.path("media").join("none.mp4")),
    ] {
        stranger.publish("minio.events", event.into()).await.unwrap().await.unwrap();
    }
    let working = queue.worker(stage.tools(), NonZeroU32::new(2)).start(queue.jobs()).unwrap();
    let outputs = ["film.mp4", "film.mp4.144p.mp4", "film.mp4.240p.mp4"];
    until("the outputs", || stage.media_folder() == outputs).await;
    assert_eq!(stage.most_threads(), 2);
    let count = async |stream| {
        let stream = stranger.get_stream(stream).await.unwrap();
        stream.cached_info().state.messages
    };
    let settled = async {
        while (count("BBMOVIE").await, count("BBMOVIE_DEAD").await) != (0, 1) {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    testing::soon("one acknowledged and one dead", settled).await;
    working.stop(Duration::from_secs(5)).await;
    queue.close().await.unwrap();
}

#[tokio::test]
async fn the_same_worker_takes_the_jobs_of_a_running_vedetta() {
    let stage = Stage::working();
    let film = stage.media("film.mp4", 240, 1).await;
    let mut options = vedetta::db::Options::new(stage.path("vedetta.db"));
    options.ballast = 0;
    let schemas = [vedetta::kv::SCHEMA, vedetta::jobs::sqlite::SCHEMA];
    let db = Db::open(&options, &schemas).unwrap();
    let store = Store::open(db.clone(), vedetta::kv::Options::default()).await.unwrap();
    let ledger = Arc::new(SqliteJobs::open(db).await.unwrap());
    let api = Api::new(store.clone()).jobs(Arc::clone(&ledger) as _);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let ending = CancellationToken::new();
    let serving = tokio::spawn(dashboard::serve(listener, api, ending.clone()));

    let queue = Queue::open(&place(&stage, url)).await.unwrap();
    let asked = Asked { file: film, outputs: Some(stage.path("outputs")), resolutions: vec![] };
    let added = queue.add(&asked).await.unwrap();
    let again = queue.add(&asked).await.unwrap();
    assert_eq!((added.is_new, again.is_new, added.id), (true, false, again.id));
    let working = queue.worker(stage.tools(), NonZeroU32::new(3)).start(queue.jobs()).unwrap();
    let job = async || ledger.job(added.id).await.unwrap().unwrap();
    let told = async {
        while job().await.message.as_deref() != Some("runs 240p, 144p") {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    testing::soon("it is seen while it runs", told).await;
    stage.open("all");
    let done = async {
        while job().await.status != JobState::Done {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    testing::soon("its end", done).await;
    let job = job().await;
    assert_eq!(made_and_kept(&job).0, ["240p", "144p"]);
    assert!((job.progress - 1.0).abs() < f32::EPSILON);
    assert!(stage.path("outputs").join("film.mp4.240p.mp4").exists());
    working.stop(Duration::from_secs(5)).await;
    queue.close().await.unwrap();
    ending.cancel();
    serving.await.unwrap();
    store.close().await;
}

/// Ended with the test, however it ends.
struct Process(Child);

impl Process {
    fn work(stage: &Stage) -> Self {
        let path = std::env::var("PATH").unwrap();
        let mut command = transcode(stage, "work");
        command.args(["--capacity", "15", "--lease", "3s"]);
        command.env("PATH", format!("{}:{path}", stage.path("bin").display()));
        Self(command.spawn().expect("the program starts"))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn transcode(stage: &Stage, command: &str) -> Command {
    let mut transcode = Command::new(env!("CARGO_BIN_EXE_transcode"));
    transcode.arg("--data").arg(stage.path("data")).arg(command);
    transcode.stdout(Stdio::null()).stderr(Stdio::null());
    transcode
}

#[tokio::test]
async fn a_worker_that_is_killed_leaves_no_ffmpeg_behind_and_the_next_one_makes_only_what_is_missing()
 {
    let stage = Stage::working();
    let film = stage.media("film.mp4", 480, 1).await;
    assert!(transcode(&stage, "add").arg(&film).status().unwrap().success());
    stage.open("film.mp4.240p.mp4");
    stage.open("film.mp4.144p.mp4");
    let mut worker = Process::work(&stage);
    let made = ["film.mp4.144p.mp4", "film.mp4.240p.mp4"];
    let half = || made.iter().all(|output| stage.path("media").join(output).exists());
    until("two of them", || half() && stage.runs().len() == 4).await;
    let before: Vec<_> = stage.runs().into_iter().filter(|run| !run.has_ended).collect();
    assert!(before.len() == 2 && before.iter().all(|run| alive(&run.pid)), "{before:?}");
    worker.0.kill().unwrap();
    worker.0.wait().unwrap();
    until("no FFmpeg", || before.iter().all(|run| !alive(&run.pid))).await;
    assert_eq!(stage.media_folder().len(), 5, "two are there, and what is left of two");

    stage.open("all");
    let mut worker = Process::work(&stage);
    let outputs = ["film.mp4", made[0], made[1], "film.mp4.360p.mp4", "film.mp4.480p.mp4"];
    until("all of them", || stage.media_folder() == outputs).await;
    let times = |of: &str| stage.runs().iter().filter(|run| run.output.contains(of)).count();
    assert_eq!(["144p", "240p", "360p", "480p"].map(times), [1, 1, 2, 2]);
    // Stopped, it finishes what is left to say.
    let stop = Command::new("kill").arg(worker.0.id().to_string()).status();
    assert!(stop.unwrap().success() && worker.0.wait().unwrap().success());
    let jobs = stage.jobs().await;
    let jobs = jobs.list(&vedetta::jobs::Filter::default(), None, 10).await.unwrap().jobs;
    let [job] = &jobs[..] else { panic!("{jobs:#?}") };
    assert_eq!((job.queue.as_str(), job.status, job.attempts), (QUEUE, JobState::Done, 2));
    assert_eq!(job.id, JobId(1));
}
