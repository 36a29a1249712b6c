//! A worker in a folder of its own, with an FFmpeg that writes down when it runs and waits to be let on.

use std::fs;
use std::num::NonZeroU32;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tempfile::TempDir;
use testing::soon;
use transcode::{Asked, KIND, Rung, Tools, sample, worker};
use vedetta::core::{Backoff, JobState};
use vedetta::db::{Db, Options};
use vedetta::jobs::sqlite::{SCHEMA, SqliteJobs};
use vedetta::jobs::{Job, JobId, Jobs as _, Ledger as _, NewJob, Working};

pub(crate) const QUEUE: &str = "transcode";

/// A run of FFmpeg, as it wrote it down itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) pid: String,
    pub(crate) threads: u32,
    pub(crate) output: String,
    pub(crate) has_ended: bool,
}

pub(crate) struct Stage {
    folder: TempDir,
}

impl Stage {
    /// With an FFmpeg that does what `does` says, where `"$ffmpeg"` is the real one.
    pub(crate) fn new(does: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let stage = Self { folder };
        for part in ["bin", "gate", "media"] {
            fs::create_dir(stage.path(part)).unwrap();
        }
        let path = std::env::var_os("PATH").unwrap();
        let real = std::env::split_paths(&path).map(|folder| folder.join("ffmpeg"));
        let real = real.into_iter().find(|file| file.exists()).expect("FFmpeg is there");
        let script = format!(
            r#"#!/bin/sh
ffmpeg='{}' log='{}' gate='{}' before=
for word; do
    if [ "$before" = -threads ]; then threads=$word; fi
    before=$word
done
output=${{word##*/.}} output=${{output%.*.part}}
echo "begins $$ $threads $output" >>"$log"
while [ ! -e "$gate/$output" ] && [ ! -e "$gate/all" ]; do sleep 0.1; done
{does}
code=$?
echo "ends $$ $threads $output" >>"$log"
exit $code
"#,
            real.display(),
            stage.path("log").display(),
            stage.path("gate").display()
        );
        let program = stage.ffmpeg();
        fs::write(&program, script).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        stage
    }

    /// With one that does its work.
    pub(crate) fn working() -> Self {
        Self::new(r#""$ffmpeg" "$@""#)
    }

    pub(crate) fn path(&self, part: &str) -> PathBuf {
        self.folder.path().join(part)
    }

    fn ffmpeg(&self) -> PathBuf {
        self.path("bin").join("ffmpeg")
    }

    pub(crate) fn tools(&self) -> Tools {
        Tools { ffmpeg: self.ffmpeg().into(), ..Tools::default() }
    }

    /// Lets FFmpeg on that makes this, or `all`.
    pub(crate) fn open(&self, output: &str) {
        fs::write(self.path("gate").join(output), "").unwrap();
    }

    /// All runs there were, as they began.
    pub(crate) fn runs(&self) -> Vec<Run> {
        let mut runs: Vec<Run> = Vec::new();
        for line in self.log().lines() {
            let words: Vec<&str> = line.split(' ').collect();
            let [what, pid, threads, output] = words[..] else { panic!("{line}") };
            let is_it = |run: &&mut Run| run.pid == pid && !run.has_ended;
            match what {
                "ends" => runs.iter_mut().find(is_it).expect("it began").has_ended = true,
                _ => runs.push(Run {
                    pid: pid.into(),
                    threads: threads.parse().unwrap(),
                    output: output.into(),
                    has_ended: false,
                }),
            }
        }
        runs
    }

    fn log(&self) -> String {
        let log = fs::read_to_string(self.path("log")).unwrap_or_default();
        // The last line may be just being written.
        log[..log.rfind('\n').map_or(0, |end| end + 1)].to_owned()
    }

    /// The outputs that FFmpeg is at.
    pub(crate) fn running(&self) -> Vec<String> {
        let running = self.runs().into_iter().filter(|run| !run.has_ended);
        let mut running: Vec<String> = running.map(|run| run.output).collect();
        running.sort();
        running
    }

    pub(crate) async fn until_running(&self, count: usize) -> Vec<String> {
        until(&format!("{count} at once"), || self.running().len() == count).await;
        self.running()
    }

    /// The most threads that ran at once. It is written down after slots are taken, and before they are given
    /// back.
    pub(crate) fn most_threads(&self) -> u32 {
        let (mut now, mut most) = (0, 0);
        for line in self.log().lines() {
            let threads: u32 = line.split(' ').nth(2).unwrap().parse().unwrap();
            now = if line.starts_with("begins") { now + threads } else { now - threads };
            most = most.max(now);
        }
        most
    }

    /// A video of this height, and of a second or two.
    pub(crate) async fn media(&self, name: &str, height: u32, seconds: u32) -> PathBuf {
        let path = self.path("media").join(name);
        // A few large pictures are as good as many.
        let rate = if height > 1000 { 2 } else { 10 };
        sample(&Tools::default(), &path, height, rate, seconds).await.unwrap();
        path
    }

    /// All that is beside the media.
    pub(crate) fn media_folder(&self) -> Vec<String> {
        let entries = fs::read_dir(self.path("media")).unwrap();
        let mut names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    /// The queue in the data folder.
    pub(crate) async fn jobs(&self) -> Arc<SqliteJobs> {
        let data = self.path("data");
        fs::create_dir_all(&data).unwrap();
        let mut options = Options::new(data.join("vedetta.db"));
        options.ballast = 0;
        let db = Db::open(&options, &[SCHEMA]).unwrap();
        Arc::new(SqliteJobs::open(db).await.unwrap())
    }

    pub(crate) async fn start(&self, capacity: u32) -> Studio {
        let jobs = self.jobs().await;
        let backoff = Backoff { first: Duration::from_millis(10), ..vedetta::jobs::BACKOFF };
        let worker = worker(QUEUE, self.tools(), NonZeroU32::new(capacity)).backoff(backoff);
        let working = worker.start(Arc::clone(&jobs) as _).unwrap();
        Studio { jobs, working }
    }
}

/// A worker and its queue.
pub(crate) struct Studio {
    pub(crate) jobs: Arc<SqliteJobs>,
    pub(crate) working: Working,
}

impl Studio {
    pub(crate) async fn add(&self, file: &Path, resolutions: &[&str]) -> JobId {
        let resolutions = resolutions.iter().map(|name| name.parse::<Rung>().unwrap()).collect();
        let asked = Asked { file: file.to_owned(), outputs: None, resolutions };
        let mut job = NewJob::new(KIND).queue(QUEUE).payload(&asked).unwrap();
        job.max_attempts = 2;
        self.jobs.enqueue(&[job]).await.unwrap()[0].id
    }

    pub(crate) async fn job(&self, id: JobId) -> Job {
        self.jobs.job(id).await.unwrap().expect("it is there")
    }

    pub(crate) async fn ended(&self, id: JobId) -> Job {
        let ended = async {
            loop {
                let job = self.job(id).await;
                if !matches!(job.status, JobState::Waiting | JobState::Running) {
                    return job;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        soon("the end of a job", ended).await
    }

    pub(crate) async fn done(&self, id: JobId) -> Job {
        let job = self.ended(id).await;
        assert_eq!(job.status, JobState::Done, "{job:#?}");
        job
    }
}

pub(crate) async fn until(what: &str, condition: impl Fn() -> bool) {
    let wait = async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    soon(what, wait).await;
}

pub(crate) fn alive(pid: &str) -> bool {
    // A zombie has ended too, though nobody has asked how.
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"));
    stat.is_ok_and(|stat| !stat.contains(") Z "))
}
