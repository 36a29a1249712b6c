//! Side by side with etcd: the same client, the same connections, the same values, by turns.
//!
//! Prediction: etcd spends 50 to 100 µs of CPU on a call, most of it in its gRPC and raft layers, and both
//! cores are full with 8 clients; ours spends what an empty gRPC server does, plus one hop to the writer
//! and its share of an fsync.

mod callers;
mod calls;
mod client;
mod leases;
mod line;
mod million;
mod server;
mod sides;
mod watches;

mod proto {
    #![allow(
        missing_docs,
        unreachable_pub,
        clippy::pedantic,
        reason = "made by the compiler of the definitions"
    )]
    tonic::include_proto!("bench");
}

use std::time::Duration;

use clap::ValueEnum;

use self::calls::{Call, Start};
use self::server::{Kind, Server};
pub(crate) use self::server::{Serve, echo, serve};
use self::sides::{Figures, Rounds};
use self::watches::Fanout;
use crate::figures::median;

/// A measurement that takes longer hangs.
const PATIENCE: Duration = Duration::from_secs(300);

pub(crate) const COLUMNS: &str = "\
Both servers are processes of their own that start empty for every measurement, on the same disk, with
fsync. They take turns; each figure is the median of the rounds, a ratio the median of the ratios of the
rounds: Vedetta's over etcd's.

  /s       calls answered, or events delivered to all watchers together, per second
  p50 p99  in ms: of the answer to a call, of the delivery of an event since its put was sent, or of how
           late a key with a lease went since its lease was asked for
  µs       CPU of the server for each
  MB       resident memory; in brackets without the pages of mapped files

`million` measures `vedetta up`, the program as it is released: build it before with
`cargo build --release -p vedetta-cli`.";

#[derive(clap::Args)]
pub(crate) struct Args {
    /// What to measure [default: all]
    scenarios: Vec<Scenario>,
    /// Measurements of each side, taken in turns; the median counts.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Seconds of each measurement, after a quarter of it to get going.
    #[arg(long, default_value_t = 2.0)]
    seconds: f64,
    /// Fail when a target is missed, and say which; name the rows that have none.
    #[arg(long)]
    check: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Scenario {
    /// Durable puts of 256 bytes by 1, 8, 64 and 256 clients.
    Puts,
    /// Reads of one key and of a hundred by 64 clients.
    Range,
    /// Four reads to a put, by 64 clients.
    Mixed,
    /// A steady stream of writes to 100 and 1,000 watchers, and to 10,000 with a key each.
    Fanout,
    /// How late the keys of 1,000 and 10,000 leases go.
    Leases,
    /// A million keys: memory, and a restart.
    Million,
    /// Our puts and reads, and etcd's puts, against a server of plain tonic that does nothing, and one that writes to a
    /// plain log and flushes it. Ours answers these calls without most of tonic, so it may come out above.
    Ceiling,
}

/// Clients and the connections they share.
const CLIENTS: [(usize, usize); 4] = [(1, 1), (8, 4), (64, 8), (256, 8)];

pub(crate) async fn run(args: Args) -> anyhow::Result<()> {
    let chosen = |scenario| args.scenarios.is_empty() || args.scenarios.contains(&scenario);
    if chosen(Scenario::Million) {
        server::released()?;
    }
    let mut targets = Targets::default();
    for &scenario in Scenario::value_variants() {
        if chosen(scenario) {
            match scenario {
                Scenario::Puts => puts(&args, &mut targets).await?,
                Scenario::Range => range(&args, &mut targets).await?,
                Scenario::Mixed => mixed(&args, &mut targets).await?,
                Scenario::Fanout => fanout(&args, &mut targets).await?,
                Scenario::Leases => leases(&args, &mut targets).await?,
                Scenario::Million => million(&args, &mut targets).await?,
                Scenario::Ceiling => ceiling(&args).await?,
            }
            println!();
        }
    }
    let Targets { missed, without } = targets;
    if args.check && !without.is_empty() {
        println!("Without a target:\n  {}", without.join("\n  "));
    }
    anyhow::ensure!(!args.check || missed.is_empty(), "Missed:\n  {}", missed.join("\n  "));
    Ok(())
}

async fn puts(args: &Args, targets: &mut Targets) -> anyhow::Result<()> {
    heading("durable puts by");
    for (callers, connections) in CLIENTS {
        let rounds = by_turns(args, async |server, time| {
            calls::measure(server, Start::Empty, Call::Put, (callers, connections), time).await
        });
        let name = format!("{callers} on {connections}");
        let rounds = rounds.await?;
        line(&name, &rounds);
        let (what, ratio) = (format!("puts by {callers}"), rounds.ratio(|f| f.rate));
        match callers {
            1 => targets.at_least(&what, ratio, 1.5),
            64 => targets.at_least(&what, ratio, 2.5),
            256 => targets.at_least(&what, ratio, 3.0),
            _ => targets.none(&what, ratio),
        }
    }
    Ok(())
}

async fn range(args: &Args, targets: &mut Targets) -> anyhow::Result<()> {
    heading("reads by 64 on 8");
    for (name, start, call) in [
        ("one key", Start::Written, Call::Get),
        ("one, serializable", Start::Written, Call::GetSerializable),
        ("100 by prefix", Start::Written, Call::GetHundred),
        ("one, restarted", Start::Restarted, Call::Get),
    ] {
        let rounds = by_turns(args, async |server, time| {
            calls::measure(server, start, call, (64, 8), time).await
        });
        let rounds = rounds.await?;
        line(name, &rounds);
        let ratio = rounds.ratio(|f| f.rate);
        if call == Call::Get && start == Start::Written {
            targets.at_least("reads of one key", ratio, 3.0);
        } else {
            targets.none(&format!("reads: {name}"), ratio);
        }
    }
    Ok(())
}

async fn mixed(args: &Args, targets: &mut Targets) -> anyhow::Result<()> {
    heading("mixed by 64 on 8");
    let rounds = by_turns(args, async |server, time| {
        calls::measure(server, Start::Written, Call::Mixed, (64, 8), time).await
    });
    let rounds = rounds.await?;
    line("80 % reads", &rounds);
    targets.none("80 % reads", rounds.ratio(|f| f.rate));
    Ok(())
}

async fn fanout(args: &Args, targets: &mut Targets) -> anyhow::Result<()> {
    heading("events to watchers");
    for (name, fanout) in [
        ("100, 8 writers", Fanout { watchers: 100, distinct: false, writers: 8 }),
        ("100, 64 writers", Fanout { watchers: 100, distinct: false, writers: 64 }),
        ("1,000, 8 writers", Fanout { watchers: 1_000, distinct: false, writers: 8 }),
        ("10,000, a key each", Fanout { watchers: 10_000, distinct: true, writers: 64 }),
    ] {
        let rounds =
            by_turns(args, async |server, time| watches::measure(server, fanout, time).await);
        let rounds = rounds.await?;
        line(name, &rounds);
        let (events, delivery) = (format!("events to {name}"), format!("delivery p99 to {name}"));
        let (rate, p99) = (rounds.ratio(|f| f.rate), rounds.ratio(|f| f.p99));
        // With 8 writers and few watchers the disk decides how much there is to tell, with a key each the writers do.
        if fanout.distinct || name == "100, 8 writers" {
            targets.none(&events, rate);
        } else {
            targets.at_least(&events, rate, 3.0);
        }
        if fanout.distinct {
            targets.none(&delivery, p99);
        } else {
            targets.at_most(&delivery, p99, 0.5);
        }
    }
    Ok(())
}

async fn leases(args: &Args, targets: &mut Targets) -> anyhow::Result<()> {
    println!(
        "{:<20} {:>27}   {:>27}   {:>15}",
        "keys late, in ms", "etcd p50 p99 most", "vedetta p50 p99 most", "µs etcd vedetta"
    );
    for leases in [1_000, 10_000] {
        let rounds =
            by_turns(args, async |server, _| leases::measure(server, leases).await).await?;
        println!(
            "{leases:<20} {:>9.1}{:>9.1}{:>9.1}   {:>9.1}{:>9.1}{:>9.1}   {:>7.0} {:>7.0}",
            rounds.etcd(|f| f.p50),
            rounds.etcd(|f| f.p99),
            rounds.etcd(|f| f.most),
            rounds.ours(|f| f.p50),
            rounds.ours(|f| f.p99),
            rounds.ours(|f| f.most),
            rounds.etcd(|f| f.cpu),
            rounds.ours(|f| f.cpu),
        );
        if leases == 10_000 {
            let p99 = rounds.ours(|f| f.p99);
            targets.at_most("p99 of 10,000 leases in ms late", p99, 20.0);
        } else {
            targets.none(&format!("p99 of {leases} leases"), rounds.ratio(|f| f.p99));
        }
    }
    Ok(())
}

async fn million(args: &Args, targets: &mut Targets) -> anyhow::Result<()> {
    println!("{:<28} {:>16} {:>16} {:>6}", "1,000,000 keys", "etcd", "vedetta", "ratio");
    let (mut etcd, mut ours) = (Vec::new(), Vec::new());
    for _ in 0..args.rounds {
        etcd.push(million::measure(Kind::Etcd).await?);
        ours.push(million::measure(Kind::Up).await?);
    }
    let line = |name: &str, figure: fn(&million::Figures) -> f64, extra: Option<fn(&_) -> f64>| {
        let of = |side: &[million::Figures], figure: fn(&million::Figures) -> f64| {
            median(&mut side.iter().map(figure).collect::<Vec<_>>())
        };
        let show = |side: &[million::Figures]| match extra {
            Some(own) => format!("{:.0} ({:.0})", of(side, figure), of(side, own)),
            None => format!("{:.2}", of(side, figure)),
        };
        let each = etcd.iter().zip(&ours).map(|(etcd, ours)| figure(ours) / figure(etcd));
        let ratio = median(&mut each.collect::<Vec<_>>());
        println!("{name:<28} {:>16} {:>16} {ratio:>6.2}", show(&etcd), show(&ours));
        ratio
    };
    let loaded = line("loaded, thousands/s", |f| f.loaded / 1e3, None);
    targets.none("loading a million keys", loaded);
    let restarted = line("restart to first read, s", |f| f.restarted, None);
    targets.at_most("restart", restarted, 1.0);
    let idle = line("MB idle", |f| f.idle.resident, Some(|f| f.idle.own));
    targets.at_most("memory idle", idle, 1.0);
    let full = line("MB with the keys", |f| f.full.resident, Some(|f| f.full.own));
    targets.at_most("memory with the keys", full, 1.0);
    let reopened = line("MB after the restart", |f| f.reopened.resident, Some(|f| f.reopened.own));
    targets.at_most("memory after the restart", reopened, 1.0);
    Ok(())
}

async fn ceiling(args: &Args) -> anyhow::Result<()> {
    println!(
        "{:<9} {:>8} {:>8} {:>8} {:>8} {:>8}   {:>8} {:>8} {:>8} {:>9}   {:>24}",
        "clients",
        "echo/s",
        "log/s",
        "etcd/s",
        "puts/s",
        "reads/s",
        "log:etcd",
        "put:log",
        "put:echo",
        "read:echo",
        "µs echo  log  put read"
    );
    for (callers, connections) in CLIENTS {
        let mut rounds = Vec::new();
        for _ in 0..args.rounds {
            let one = async |kind, start, call| {
                let measure = async |server: &mut Server, time| {
                    calls::measure(server, start, call, (callers, connections), time).await
                };
                side(args, kind, &measure).await
            };
            rounds.push([
                one(Kind::Echo, Start::Empty, Call::Echo).await?,
                one(Kind::Echo, Start::Empty, Call::Log).await?,
                one(Kind::Etcd, Start::Empty, Call::Put).await?,
                one(Kind::Vedetta, Start::Empty, Call::Put).await?,
                one(Kind::Vedetta, Start::Written, Call::Get).await?,
            ]);
        }
        let of = |figure: &dyn Fn(&[Figures; 5]) -> f64| {
            median(&mut rounds.iter().map(figure).collect::<Vec<_>>())
        };
        let rate = |of_side: usize| of(&|round| round[of_side].rate);
        let cpu = |of_side: usize| of(&|round| round[of_side].cpu);
        let ratio = |ours: usize, other: usize| of(&|round| round[ours].rate / round[other].rate);
        println!(
            "{:<9} {:>8.0} {:>8.0} {:>8.0} {:>8.0} {:>8.0}   {:>8.2} {:>8.2} {:>8.2} {:>9.2}   {:>9.1} {:>4.1} {:>4.1} {:>4.1}",
            format!("{callers} on {connections}"),
            rate(0),
            rate(1),
            rate(2),
            rate(3),
            rate(4),
            ratio(1, 2),
            ratio(3, 1),
            ratio(3, 0),
            ratio(4, 0),
            cpu(0),
            cpu(1),
            cpu(3),
            cpu(4),
        );
    }
    Ok(())
}

/// Both sides, one after the other, as often as asked for.
async fn by_turns(
    args: &Args,
    measure: impl AsyncFn(&mut Server, Duration) -> anyhow::Result<Figures>,
) -> anyhow::Result<Rounds> {
    let mut rounds = Rounds::default();
    for _ in 0..args.rounds {
        let etcd = side(args, Kind::Etcd, &measure).await?;
        let ours = side(args, Kind::Vedetta, &measure).await?;
        rounds.0.push((etcd, ours));
    }
    Ok(rounds)
}

async fn side(
    args: &Args,
    kind: Kind,
    measure: &impl AsyncFn(&mut Server, Duration) -> anyhow::Result<Figures>,
) -> anyhow::Result<Figures> {
    let mut server = Server::start(kind).await?;
    let measuring = measure(&mut server, Duration::from_secs_f64(args.seconds));
    let figures = match tokio::time::timeout(PATIENCE, measuring).await {
        Ok(figures) => figures.map_err(|error| error.context(format!("{kind:?}")))?,
        Err(_) => anyhow::bail!("{kind:?} does not answer any more"),
    };
    server.stop().await?;
    Ok(figures)
}

fn heading(what: &str) {
    println!(
        "{what:<20} {:>9} {:>9} {:>6}   {:>16}   {:>16} {:>6}   {:>15}",
        "etcd/s",
        "vedetta/s",
        "ratio",
        "etcd p50 p99",
        "vedetta p50 p99",
        "ratio",
        "µs etcd vedetta"
    );
}

fn line(name: &str, rounds: &Rounds) {
    println!(
        "{name:<20} {:>9.0} {:>9.0} {:>6.2}   {:>8.2}{:>8.2}   {:>8.2}{:>8.2} {:>6.2}   {:>7.1} {:>7.1}",
        rounds.etcd(|f| f.rate),
        rounds.ours(|f| f.rate),
        rounds.ratio(|f| f.rate),
        rounds.etcd(|f| f.p50),
        rounds.etcd(|f| f.p99),
        rounds.ours(|f| f.p50),
        rounds.ours(|f| f.p99),
        rounds.ratio(|f| f.p99),
        rounds.etcd(|f| f.cpu),
        rounds.ours(|f| f.cpu),
    );
}

/// What `--check` has to say.
#[derive(Default)]
struct Targets {
    missed: Vec<String>,
    /// Rows that are only measured, with their ratios.
    without: Vec<String>,
}

impl Targets {
    fn at_least(&mut self, what: &str, is: f64, least: f64) {
        if is < least {
            self.missed.push(format!("{what}: {is:.2}, should be at least {least}"));
        }
    }

    fn at_most(&mut self, what: &str, is: f64, most: f64) {
        if is > most {
            self.missed.push(format!("{what}: {is:.2}, should be at most {most}"));
        }
    }

    fn none(&mut self, what: &str, ratio: f64) {
        self.without.push(format!("{what}: {ratio:.2}"));
    }
}
