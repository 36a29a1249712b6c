//! Benchmarks: ours and the other, side by side in one run. Only the ratios mean something on a machine
//! that others use too.

mod etcd;
mod fanout;
mod figures;
mod fleet;
mod floor;
mod jobs;
mod million;
mod npm;
mod puts;
mod rooms;
mod schedule;
mod setup;
mod slots;
mod stages;
mod transcoding;
mod ttl;
mod turns;
mod watch;

use std::process::ExitCode;

use clap::Parser;

/// As the program has it: the servers measured are children of this one.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Measures Vedetta against a floor measured in the same run, and prints the ratio.
#[derive(Parser)]
enum Bench {
    /// Durable puts against a plain append-only log with fdatasync.
    #[command(after_help = puts::COLUMNS)]
    Puts(puts::Args),
    /// One stream of writes to many watchers in the same process.
    #[command(after_help = fanout::COLUMNS)]
    Fanout(fanout::Args),
    /// How late keys with a TTL go, and what leases cost while nothing happens.
    #[command(after_help = ttl::FIGURES)]
    Ttl(ttl::Args),
    /// A million keys: loading, opening, memory, range and count.
    #[command(after_help = million::FIGURES)]
    Million(million::Args),
    /// Weighted slots, simulated: how much is used and who waits how long.
    #[command(after_help = slots::FIGURES)]
    Slots(slots::Args),
    /// A million keys in the schedule, against kube-rs's scheduler and tokio's delay queue.
    #[command(after_help = schedule::ROWS)]
    Schedule(schedule::Args),
    /// Ids under a watcher, from a change to its handler, against kube-rs's Controller.
    #[command(after_help = watch::FIGURES)]
    Watch(watch::Args),
    /// Runs of stages on SQLite and PostgreSQL, against graphile-worker on the same PostgreSQL.
    #[command(after_help = stages::ROWS)]
    Stages(stages::Args),
    /// Our side of `stages`.
    #[command(hide = true)]
    StagesOurs(stages::Ours),
    /// Jobs on PostgreSQL and SQLite, against graphile-worker, pg-boss and apalis on the same PostgreSQL.
    #[command(after_help = jobs::ROWS)]
    Jobs(jobs::Args),
    /// Our side of `jobs`.
    #[command(hide = true)]
    JobsOurs(jobs::Ours),
    /// Films made into all resolutions: how much of the cores the weighted slots use.
    #[command(after_help = transcoding::FIGURES)]
    Transcode(transcoding::Args),
    /// Live rooms on a real Janus with real FFmpeg: how soon they are on air, what they cost, and what is left of them.
    #[command(after_help = rooms::FIGURES)]
    Rooms(rooms::Args),
    /// What idle worker processes cost their server, and how soon they obey.
    #[command(after_help = fleet::FIGURES)]
    Fleet(fleet::Args),
    /// Side by side with etcd, each a process of its own, the same client for both.
    #[command(after_help = etcd::COLUMNS)]
    Etcd(etcd::Args),
    /// Our side of `etcd`.
    #[command(hide = true)]
    EtcdServe(etcd::Serve),
    /// The ceiling of `etcd`.
    #[command(hide = true)]
    EtcdEcho(etcd::Serve),
}

fn main() -> ExitCode {
    match run(Bench::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(bench: Bench) -> anyhow::Result<()> {
    let runtime = match bench {
        // Servers run beside it and need the cores more: one thread, and none that is woken to help.
        Bench::Etcd(_) => tokio::runtime::Builder::new_current_thread().enable_all().build()?,
        _ => tokio::runtime::Builder::new_multi_thread().enable_all().build()?,
    };
    runtime.block_on(async {
        match bench {
            Bench::Puts(args) => puts::run(args).await,
            Bench::Fanout(args) => fanout::run(args).await,
            Bench::Ttl(args) => ttl::run(args).await,
            Bench::Million(args) => million::run(args).await,
            Bench::Slots(args) => slots::run(&args),
            Bench::Schedule(args) => schedule::run(args).await,
            Bench::Watch(args) => watch::run(args).await,
            Bench::Stages(args) => stages::run(args).await,
            Bench::StagesOurs(args) => stages::ours(args).await,
            Bench::Jobs(args) => jobs::run(args).await,
            Bench::JobsOurs(args) => jobs::work(args).await,
            Bench::Transcode(args) => transcoding::run(args).await,
            Bench::Rooms(args) => rooms::run(args).await,
            Bench::Fleet(args) => fleet::run(&args).await,
            Bench::Etcd(args) => etcd::run(args).await,
            Bench::EtcdServe(args) => etcd::serve(args).await,
            Bench::EtcdEcho(args) => etcd::echo(args).await,
        }
    })
}
