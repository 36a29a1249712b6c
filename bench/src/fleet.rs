//! A fleet at rest: what idle workers cost their server, and how soon one of them obeys. No other system is
//! beside it; the figures are held against what was promised.
//!
//! Prediction: a beat of a worker is a small request every three seconds that touches memory alone, some 100 µs; so a
//! hundred of them cost a third of a per cent of a core, and what looks after them about as much again. A command is a
//! commit, a push and two requests: a few milliseconds.

use std::io::{BufRead as _, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use serde_json::Value;

use crate::figures::{millis, quantile};

/// How much of a core the server may take.
const CPU: f64 = 0.02;
/// How long a command may take until it is obeyed, p99.
const OBEYED: Duration = Duration::from_millis(50);
/// What starts may take so long.
const SOON: Duration = Duration::from_secs(120);

pub(crate) const FIGURES: &str = "\
Figures:
  CPU     of the server, in per cent of a core, while its workers have nothing to do
  obeyed  from the call that pauses or resumes an idle worker until the server tells that it has, p50 and p99

Each worker is a process of its own; all are children of the server, which is the program as it is released: build
it before with `cargo build --release`.";

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Worker processes.
    #[arg(long, default_value_t = 100)]
    workers: usize,
    /// Seconds at rest.
    #[arg(long, default_value_t = 30)]
    seconds: u64,
    /// Commands.
    #[arg(long, default_value_t = 400)]
    samples: usize,
    /// What brings commands.
    #[arg(long, default_value = "embedded")]
    bus: Bus,
    /// The program [default: vedetta beside this one]
    #[arg(long)]
    program: Option<PathBuf>,
    /// Fail when the server takes more than 2 % of a core, or a command more than 50 ms, p99.
    #[arg(long)]
    check: bool,
}

/// What brings commands.
#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum Bus {
    /// The file of the server.
    Embedded,
    /// A Redis of its own, which flushes each write.
    Redis,
    /// A PostgreSQL of its own.
    Postgres,
}

/// Where commands are, while this lives; nothing for the file of the server.
enum Place {
    Embedded,
    Redis(testing::redis::Server),
    Postgres(testing::postgres::Server),
}

impl Place {
    async fn of(bus: Bus) -> Self {
        match bus {
            Bus::Embedded => Self::Embedded,
            Bus::Redis => Self::Redis(testing::redis::Server::start().await),
            Bus::Postgres => Self::Postgres(testing::postgres::Server::start().await),
        }
    }

    fn url(&self) -> Option<String> {
        match self {
            Self::Embedded => None,
            Self::Redis(redis) => Some(redis.url()),
            Self::Postgres(postgres) => Some(postgres.url()),
        }
    }
}

pub(crate) async fn run(args: &Args) -> anyhow::Result<()> {
    let place = Place::of(args.bus).await;
    let beside = std::env::current_exe()?.with_file_name("vedetta");
    let program = args.program.clone().unwrap_or(beside);
    anyhow::ensure!(program.exists(), "there is no {}: cargo build --release", program.display());
    let folder = tempfile::tempdir()?;
    let config = format!(
        "[handler.nothing]\nrun = ['true']\n[supervisor.default]\nmin = {0}\nmax = {0}\n",
        args.workers
    );
    std::fs::write(folder.path().join("vedetta.toml"), config)?;
    let mut up = Command::new(program);
    let up = up.args(["up", "--http", "127.0.0.1:0", "--etcd", "127.0.0.1:0"]);
    let up = up.current_dir(folder.path()).stdout(Stdio::piped()).stderr(Stdio::null());
    let up = match place.url() {
        Some(url) => up.env("VEDETTA_BUS_URL", url),
        None => up.env_remove("VEDETTA_BUS_URL"),
    };
    let server = Server::start(up)?;

    server.until(args.workers)?;
    std::thread::sleep(Duration::from_secs(5));
    let (used, began) = (server.cpu()?, Instant::now());
    std::thread::sleep(Duration::from_secs(args.seconds));
    let cpu = (server.cpu()? - used) / began.elapsed().as_secs_f64();

    let ids = server.running()?;
    let mut obeyed = Vec::with_capacity(args.samples);
    for sample in 0..args.samples {
        let id = &ids[(sample / 2) % ids.len()];
        let order = if sample % 2 == 0 { "pause" } else { "resume" };
        obeyed.push(server.obeys(id, order)?);
        std::thread::sleep(Duration::from_millis(fastrand::u64(5..15)));
    }
    let [p50, p99] = [0.5, 0.99].map(|share| quantile(&mut obeyed, share));
    println!("commands: {:?}", args.bus);
    println!("{} idle workers: the server takes {:.2} % of a core", ids.len(), cpu * 100.0);
    println!("a command is obeyed after {:.1} ms, p99 {:.1} ms", millis(p50), millis(p99));
    drop(server);
    drop(place);
    let missed = cpu > CPU || p99 > OBEYED;
    anyhow::ensure!(!args.check || !missed, "more than 2 % of a core, or 50 ms");
    Ok(())
}

struct Server {
    child: Child,
    url: String,
    agent: ureq::Agent,
}

impl Server {
    fn start(up: &mut Command) -> anyhow::Result<Self> {
        let mut child = up.spawn().context("cannot start the program")?;
        let lines = BufReader::new(child.stdout.take().expect("it is piped")).lines();
        let agent = ureq::Agent::new_with_defaults();
        let mut server = Self { child, url: String::new(), agent };
        for line in lines {
            let line = line?;
            if let Some(url) = line.strip_prefix("page") {
                url.trim().trim_end_matches('/').clone_into(&mut server.url);
            }
            if line == "ready" {
                return Ok(server);
            }
        }
        anyhow::bail!("the program has ended: {}", server.child.wait()?)
    }

    fn get(&self, path: &str) -> anyhow::Result<Value> {
        let mut answer = self.agent.get(format!("{}/api/v1/{path}", self.url)).call()?;
        Ok(answer.body_mut().read_json()?)
    }

    fn running(&self) -> anyhow::Result<Vec<String>> {
        let all = self.get("workers")?;
        let workers = all["workers"].as_array().context("a list of workers")?;
        let running = workers.iter().filter(|worker| worker["status"] == "running");
        Ok(running.filter_map(|worker| Some(worker["id"].as_str()?.to_owned())).collect())
    }

    fn until(&self, workers: usize) -> anyhow::Result<()> {
        let began = Instant::now();
        while self.running()?.len() < workers {
            anyhow::ensure!(began.elapsed() < SOON, "{workers} workers do not start");
            std::thread::sleep(Duration::from_millis(200));
        }
        Ok(())
    }

    /// Until it is told that a worker has obeyed.
    fn obeys(&self, id: &str, order: &str) -> anyhow::Result<Duration> {
        let began = Instant::now();
        let path = format!("{}/api/v1/workers/{id}/{order}", self.url);
        let asked: Value = self.agent.post(path).send_empty()?.body_mut().read_json()?;
        let command = asked["id"].as_str().context("the id of a command")?;
        loop {
            match self.get(&format!("commands/{command}"))?["state"].as_str() {
                Some("applied") => return Ok(began.elapsed()),
                Some("requested" | "taken") => {}
                other => anyhow::bail!("a command is {other:?}"),
            }
            anyhow::ensure!(began.elapsed() < SOON, "a command is not obeyed");
        }
    }

    /// Seconds of CPU time so far, of its own and not of its children.
    fn cpu(&self) -> anyhow::Result<f64> {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id()))?;
        let (_, after_name) = stat.rsplit_once(')').context("a name in it")?;
        let mut ticks = 0.0;
        for field in after_name.split_ascii_whitespace().skip(11).take(2) {
            ticks += field.parse::<f64>()?;
        }
        #[expect(clippy::cast_precision_loss, reason = "a hundred or so")]
        let each = rustix::param::clock_ticks_per_second() as f64;
        Ok(ticks / each)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let pid = i32::try_from(self.child.id()).ok().and_then(rustix::process::Pid::from_raw);
        if let Some(pid) = pid {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        }
        let _ = self.child.wait();
    }
}
