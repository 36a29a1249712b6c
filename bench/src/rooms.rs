//! Fifty live rooms on one machine: how soon each has its stream, what they cost, and whether anything is left of them when
//! many have come and gone. No other system is beside it; the figures are held against what is left at the end: nothing.
//!
//! Prediction: a segment is two seconds of sound, so the first one is there two seconds after FFmpeg hears the first packet,
//! and starting an FFmpeg for each of fifty on two cores takes a few seconds more, p99. Janus and each FFmpeg take about a per cent of a core for a
//! room; the services take almost nothing, as nothing changes.

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use serde_json::{Value, json};
use testing::janus::{ADMIN_KEY, ADMIN_SECRET, Janus};
use vedetta_core::{KeyRange, Source as _};
use vedetta_etcd::Cluster;

use crate::figures::quantile;

/// What takes longer hangs.
const SOON: Duration = Duration::from_secs(120);
/// When to look again.
const LOOK: Duration = Duration::from_millis(20);
/// Open files that a process may have more of: connections that wait to be used again.
const IDLE: usize = 10;
/// Megabytes that a process may have grown by in the second half of the churn: what an allocator keeps for later.
const GROWTH: u64 = 16;
/// How many times the p99 of the first half of the churn that of the second may be, and a second more.
const SLOWER: f64 = 1.5;
/// How many times the CPU before the churn that after it may be, and a per cent of a core more, for who takes next to nothing.
const BUSIER: f64 = 1.3;
/// In the environment of all that is started here.
const MARK: &str = "VEDETTA_BENCH_ROOMS";

pub(crate) const FIGURES: &str = "\
Figures:
  first segment  from the request that creates a room until the first segment is in its playlist, p50, p99 and the last
  CPU            in per cent of a core while all rooms are on air, before the churn and after it: of Janus, of all FFmpegs, of the
                 services (rooms, janus, mixer), and of the store; may be 1.3 times as much after it, and a per cent more
  churn          rooms removed and others created, one after the other finished, as many at once as said; the first segment again, in
                 the first half of it and in the second, whose p99 may be 1.5 times that of the first, and a second more
  drift          processes, RTP ports, rooms in Janus, folders of streams and keys when all rooms are gone, before and after; must be the
                 same. Open files may be up to 10 more, connections that wait to be used again. And the memory of each: before
                 the first room, in the middle of the churn and at its end, with all rooms on air, when it may be 16 MB more

A real Janus, a real FFmpeg for each room, and every service a process of its own, on a `vedetta up`. Build them before with
`cargo build --release -p vedetta-cli -p live-rooms`.";

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Rooms on air at once.
    #[arg(long, default_value_t = 50)]
    rooms: usize,
    /// Seconds at rest.
    #[arg(long, default_value_t = 20)]
    seconds: u64,
    /// Rooms that come and go in the churn.
    #[arg(long, default_value_t = 300)]
    churn: usize,
    /// How many of these at once.
    #[arg(long, default_value_t = 4)]
    at_once: usize,
    /// What the sound is made into: `copy` leaves the Opus as it is.
    #[arg(long, default_value = "copy")]
    codec: String,
    /// Where the programs are [default: beside this one]
    #[arg(long)]
    programs: Option<PathBuf>,
    /// Fail when anything is left at the end, or when the churn has made anything bigger, slower or busier.
    #[arg(long)]
    check: bool,
}

pub(crate) async fn run(args: Args) -> anyhow::Result<()> {
    let world = World::start(&args).await?;
    let names: Vec<String> = (0..args.rooms).map(|n| format!("room-{n}")).collect();
    // One comes and goes first: what is begun at the first use is no drift.
    world.open("first").await?;
    world.close("first").await?;
    world.until_empty().await?;
    let before = world.left().await?;

    let begun = Instant::now();
    let mut first = world.open_all(&names, args.rooms).await?;
    println!(
        "{} rooms on {} cores, {}",
        args.rooms,
        std::thread::available_parallelism()?,
        args.codec
    );
    println!(
        "first segment     {}, all after {:.1} s",
        told(&mut first),
        begun.elapsed().as_secs_f64()
    );

    let fresh = world.cpu_at_rest(args.seconds).await;

    let (begun, mut halves) = (Instant::now(), [Vec::new(), Vec::new()]);
    let mut open: Vec<String> = names;
    let (rounds, mut midway) = (args.churn.div_ceil(args.at_once.max(1)), world.memory()?);
    for round in 0..rounds {
        let half = usize::from(round >= rounds / 2);
        if round == rounds / 2 {
            midway = world.memory()?;
        }
        let gone: Vec<String> = (0..args.at_once.min(open.len()))
            .map(|_| open.swap_remove(fastrand::usize(..open.len())))
            .collect();
        for room in &gone {
            world.close(room).await?;
        }
        let new: Vec<String> = (0..gone.len()).map(|n| format!("churn-{round}-{n}")).collect();
        halves[half].extend(world.open_all(&new, new.len()).await?);
        open.extend(new);
    }
    let (lasted, count) = (begun.elapsed().as_secs_f64(), halves[0].len() + halves[1].len());
    let [first, second] = &mut halves;
    println!("churn of {count:<9}in {lasted:.0} s\n  first half      {}", told(first));
    println!("  second half     {}", told(second));
    let mut worse = Vec::new();
    if !first.is_empty() && !second.is_empty() {
        let [before, after] = [first, second].map(|half| quantile(half, 0.99).as_secs_f64());
        if after > before * SLOWER + 1.0 {
            worse.push(format!("first segment, p99: {after:.2} s, {before:.2} s before"));
        }
    }
    let grown = world.memory()?;
    let worn = world.cpu_at_rest(args.seconds).await;
    for (name, share) in fresh {
        let then = worn.get(name).copied().unwrap_or_default();
        println!("CPU of {name:<11}{share:>5.1} %, after the churn {then:.1} %");
        if then > share * BUSIER + 1.0 {
            worse.push(format!("CPU of {name}: {then:.1} %, {share:.1} % before"));
        }
    }
    for room in &open {
        world.close(room).await?;
    }
    world.until_empty().await?;
    let after = world.until_as(&before).await?;
    println!("left before       {before}\nleft after        {after}");
    for (name, at_first) in &before.memory {
        let [midway, grown] = [&midway, &grown].map(|at| at.get(name).copied().unwrap_or_default());
        println!(
            "memory of {name:<8}{at_first:>5} MB, {midway} MB midway, {grown} MB after the churn"
        );
        if grown > midway + GROWTH {
            worse.push(format!("memory of {name}: {grown} MB, {midway} MB midway"));
        }
    }
    world.end();
    anyhow::ensure!(!args.check || after.is_as(&before), "something is left over");
    anyhow::ensure!(
        !args.check || worse.is_empty(),
        "Worse after the churn:\n  {}",
        worse.join("\n  ")
    );
    Ok(())
}

fn told(times: &mut [Duration]) -> String {
    if times.is_empty() {
        return "none".to_owned();
    }
    let [p50, p99, last] = [0.5, 0.99, 1.0].map(|share| quantile(times, share).as_secs_f64());
    format!("p50 {p50:.2} s, p99 {p99:.2} s, last {last:.2} s")
}

/// What there is when there should be no room.
#[derive(Debug, Clone, Default)]
struct Left {
    processes: usize,
    ports: usize,
    in_janus: usize,
    folders: usize,
    keys: usize,
    files: BTreeMap<&'static str, usize>,
    /// Megabytes; not compared.
    memory: BTreeMap<&'static str, u64>,
}

impl Left {
    /// Whether nothing has grown since.
    fn is_as(&self, before: &Self) -> bool {
        let all =
            |left: &Self| (left.processes, left.ports, left.in_janus, left.folders, left.keys);
        let fits = |(name, now): (&&str, &usize)| {
            *now <= before.files.get(name).map_or(0, |then| then + IDLE)
        };
        all(self) == all(before) && self.files.iter().all(fits)
    }
}

impl std::fmt::Display for Left {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { processes, ports, in_janus, folders, keys, files, .. } = self;
        write!(
            f,
            "{processes} processes, {ports} RTP ports, {in_janus} rooms in Janus, {folders} folders, {keys} keys, open files {files:?}"
        )
    }
}

struct World {
    janus: Janus,
    store: Cluster,
    api: String,
    processes: BTreeMap<&'static str, Child>,
    ports: (u16, u16),
    mark: String,
    folder: tempfile::TempDir,
}

impl World {
    async fn start(args: &Args) -> anyhow::Result<Self> {
        let beside =
            std::env::current_exe()?.parent().context("a program is in a folder")?.to_owned();
        let programs = args.programs.clone().unwrap_or(beside);
        let folder = tempfile::tempdir()?;
        let mark = folder.path().to_string_lossy().into_owned();
        let janus = Janus::start(&[(MARK, &mark)]).await;
        let pairs = u16::try_from(args.rooms * 2 + args.at_once * 4 + 20)?;
        let ports = (42_000, 42_000 + pairs * 2);
        let nowhere: Cluster = "127.0.0.1:1".parse()?;
        let processes = BTreeMap::new();
        let mut world =
            Self { janus, store: nowhere, api: String::new(), processes, ports, mark, folder };

        let begin = |world: &mut Self, name, program: &str, arguments: &[&str], sign: &str| {
            let path = programs.join(program);
            let build = "cargo build --release -p vedetta-cli -p live-rooms";
            anyhow::ensure!(path.exists(), "there is no {}: {build}", path.display());
            let mut command = Command::new(path);
            command.args(arguments).current_dir(world.folder.path()).env(MARK, &world.mark);
            command.env("JANUS_ADMIN_SECRET", ADMIN_SECRET).env("JANUS_ADMIN_KEY", ADMIN_KEY);
            command
                .stdin(Stdio::null())
                .stdout(Stdio::piped())
                .stderr(log(world.folder.path(), name)?);
            let mut child = command.spawn().with_context(|| format!("cannot start {program}"))?;
            let mut lines = BufReader::new(child.stdout.take().context("it is piped")?).lines();
            world.processes.insert(name, child);
            let mut said = Vec::new();
            for line in &mut lines {
                let line = line?;
                said.push(line.clone());
                if line.contains(sign) {
                    // What it says later must be read, or it waits.
                    std::thread::spawn(move || lines.for_each(drop));
                    return Ok(said);
                }
            }
            anyhow::bail!("{name} has ended: {said:?}")
        };
        let up = ["up", "--http", "127.0.0.1:0", "--etcd", "127.0.0.1:0", "--data", "data"];
        let said = begin(&mut world, "store", "vedetta", &up, "ready")?;
        let etcd =
            said.iter().find_map(|line| line.strip_prefix("etcd ")).context("it says where")?;
        let url = etcd.trim().replace("http://", "etcd://");
        world.store = url.parse()?;
        let rooms = ["rooms", "--store", &url, "--listen", "127.0.0.1:0"];
        let said = begin(&mut world, "rooms", "live-rooms", &rooms, "listening on ")?;
        let at = said
            .last()
            .and_then(|line| line.split_once("listening on "))
            .context("it says where")?;
        at.1.trim().clone_into(&mut world.api);
        let (admin, capacity) =
            (world.janus.admin(), (args.rooms + args.at_once * 2 + 10).to_string());
        let janus = [
            "janus",
            "--store",
            &url,
            "--id",
            "j",
            "--admin",
            &admin,
            "--capacity",
            &capacity,
            "--ready",
        ];
        begin(&mut world, "manager", "live-rooms", &janus, "ready")?;
        let (range, media) = (format!("{}-{}", ports.0, ports.1), world.media());
        let media = media.to_string_lossy();
        let mixer = ["mixer", "--store", &url, "--id", "m", "--ports", &range, "--media", &media];
        let more = ["--capacity", &capacity, "--codec", &args.codec, "--ready"];
        begin(&mut world, "mixer", "live-rooms", &[&mixer[..], &more].concat(), "ready")?;
        Ok(world)
    }

    fn media(&self) -> PathBuf {
        self.folder.path().join("media")
    }

    async fn ask(
        &self,
        method: &str,
        path: &str,
        body: Option<Value>,
    ) -> anyhow::Result<(u16, String)> {
        let body = body.map(|body| body.to_string()).unwrap_or_default();
        let request =
            ureq::http::Request::builder().method(method).uri(format!("{}{path}", self.api));
        let request = request.header("content-type", "application/json").body(body)?;
        let asked = tokio::task::spawn_blocking(move || {
            let agent =
                ureq::Agent::config_builder().http_status_as_error(false).proxy(None).build();
            let mut answer = ureq::Agent::from(agent).run(request)?;
            let text = answer.body_mut().read_to_string()?;
            Ok::<_, ureq::Error>((answer.status().as_u16(), text))
        });
        Ok(asked.await??)
    }

    /// Creates and starts a room; returns when its first segment is there, and tells how long that took.
    async fn open(&self, room: &str) -> anyhow::Result<Duration> {
        let begun = Instant::now();
        let (status, text) = self.ask("POST", "/rooms", Some(json!({ "id": room }))).await?;
        anyhow::ensure!(status == 201, "{room}: {status} {text}");
        let (status, text) = self.ask("POST", &format!("/rooms/{room}/start"), None).await?;
        anyhow::ensure!(status == 200, "{room}: {status} {text}");
        let playlist = self.media().join(room).join("index.m3u8");
        until(&format!("the first segment of {room}"), async || {
            let text = std::fs::read_to_string(&playlist).unwrap_or_default();
            Ok(text.contains("seg_").then(|| begun.elapsed()))
        })
        .await
    }

    async fn open_all(&self, rooms: &[String], at_once: usize) -> anyhow::Result<Vec<Duration>> {
        use futures_util::{StreamExt as _, TryStreamExt as _};
        let opening = rooms.iter().map(|room| self.open(room));
        futures_util::stream::iter(opening).buffer_unordered(at_once.max(1)).try_collect().await
    }

    async fn close(&self, room: &str) -> anyhow::Result<()> {
        let (status, text) = self.ask("DELETE", &format!("/rooms/{room}"), None).await?;
        anyhow::ensure!(status == 202, "{room}: {status} {text}");
        Ok(())
    }

    /// Waits until there are no rooms.
    async fn until_empty(&self) -> anyhow::Result<()> {
        until("no rooms", async || {
            let left = self.left().await?;
            let rooms = self.store.list(KeyRange::prefix("/rooms/"), None).await?.entries.len();
            let there = left.ports + left.in_janus + left.folders + rooms;
            Ok((there == 0).then_some(()))
        })
        .await
    }

    /// What is left: when it is as it was, or after a while, in which connections that are idle end.
    async fn until_as(&self, before: &Left) -> anyhow::Result<Left> {
        let end = Instant::now() + Duration::from_secs(30);
        loop {
            let now = self.left().await?;
            if now.is_as(before) || Instant::now() > end {
                return Ok(now);
            }
            tokio::time::sleep(LOOK * 10).await;
        }
    }

    async fn left(&self) -> anyhow::Result<Left> {
        let table = std::fs::read_to_string("/proc/net/udp")?;
        let port = |line: &str| {
            let address = line.split_whitespace().nth(1)?;
            u16::from_str_radix(address.split_once(':')?.1, 16).ok()
        };
        let is_ours = |port: &u16| (self.ports.0..=self.ports.1).contains(port);
        let mut files = BTreeMap::new();
        for (name, pid) in self.pids() {
            files.insert(name, std::fs::read_dir(format!("/proc/{pid}/fd"))?.count());
        }
        let folders = std::fs::read_dir(self.media())?.flatten();
        Ok(Left {
            folders: folders.filter(|entry| entry.path().is_dir()).count(),
            processes: marked(&self.mark).len(),
            ports: table.lines().skip(1).filter_map(port).filter(is_ours).count(),
            in_janus: self.janus.rooms().await.len(),
            keys: self.store.list(KeyRange::all(), None).await?.entries.len(),
            files,
            memory: self.memory()?,
        })
    }

    /// Megabytes of each process.
    fn memory(&self) -> anyhow::Result<BTreeMap<&'static str, u64>> {
        let mut memory = BTreeMap::new();
        for (name, pid) in self.pids() {
            let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
            let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
            let kilobytes =
                resident.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
            memory.insert(name, kilobytes.unwrap_or(0) / 1024);
        }
        Ok(memory)
    }

    /// The share of a core that each takes while nothing comes or goes, in per cent.
    async fn cpu_at_rest(&self, seconds: u64) -> BTreeMap<&'static str, f64> {
        let (used, begun) = (self.cpu(), Instant::now());
        tokio::time::sleep(Duration::from_secs(seconds)).await;
        let lasted = begun.elapsed().as_secs_f64();
        let share = |(name, after): (&'static str, Duration)| {
            let took = after.saturating_sub(used.get(name).copied().unwrap_or_default());
            (name, took.as_secs_f64() / lasted * 100.0)
        };
        self.cpu().into_iter().map(share).collect()
    }

    fn pids(&self) -> BTreeMap<&'static str, u32> {
        let ours = self.processes.iter().map(|(name, child)| (*name, child.id()));
        ours.chain(self.janus.pid().map(|pid| ("Janus", pid))).collect()
    }

    /// The CPU time of each.
    fn cpu(&self) -> BTreeMap<&'static str, Duration> {
        let mut used = BTreeMap::new();
        let known: BTreeMap<u32, &str> =
            self.pids().into_iter().map(|(name, pid)| (pid, name)).collect();
        for pid in marked(&self.mark) {
            let name = match known.get(&pid).copied() {
                Some("rooms" | "manager" | "mixer") => "services",
                Some("store") => "the store",
                Some(_) => "Janus",
                None => "FFmpeg",
            };
            let Ok(stat) = std::fs::read_to_string(format!("/proc/{pid}/stat")) else { continue };
            let fields = stat.rsplit_once(')').map(|(_, rest)| rest).unwrap_or_default();
            let ticks =
                fields.split_whitespace().skip(11).take(2).filter_map(|n| n.parse::<u64>().ok());
            let ticks: u64 = ticks.sum();
            let time =
                Duration::from_millis(ticks * 1000 / rustix::param::clock_ticks_per_second());
            *used.entry(name).or_default() += time;
        }
        used
    }

    fn end(mut self) {
        self.stop();
    }

    /// Those that use the store first.
    fn stop(&mut self) {
        for name in ["mixer", "manager", "rooms", "store"] {
            if let Some(mut child) = self.processes.remove(name) {
                let pid = rustix::process::Pid::from_child(&child);
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
                let _ = child.wait();
            }
        }
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.stop();
    }
}

fn log(folder: &Path, name: &str) -> anyhow::Result<std::fs::File> {
    Ok(std::fs::File::create(folder.join(format!("{name}.log")))?)
}

async fn until<T>(
    what: &str,
    look: impl AsyncFn() -> anyhow::Result<Option<T>>,
) -> anyhow::Result<T> {
    let end = Instant::now() + SOON;
    loop {
        if let Some(found) = look().await? {
            return Ok(found);
        }
        anyhow::ensure!(Instant::now() < end, "it hangs: {what}");
        tokio::time::sleep(LOOK).await;
    }
}

/// Processes that have our mark.
fn marked(mark: &str) -> Vec<u32> {
    let mark = format!("{MARK}={mark}");
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let is_ours = |pid: &u32| {
        let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        environment.split(|byte| *byte == 0).any(|each| each == mark.as_bytes())
    };
    pids.filter(is_ours).collect()
}
