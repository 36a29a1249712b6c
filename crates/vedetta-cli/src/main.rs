//! The `vedetta` program: arguments, the config file, exit codes.

mod backup;
mod client;
mod completions;
mod config;
mod doctor;
mod exit;
mod fleet;
mod job;
mod kv;
mod output;
mod queue;
mod stage;
mod streams;
mod supervise;
mod token;
mod top;
mod up;
mod user;
mod watcher;
mod worker;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// A call of the etcd API is a few dozen small allocations, many freed by another thread than made them:
/// with glibc's allocator they were a fifth of the server's time.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// One program that keeps what should be true, and tells whoever watches when it changes.
#[derive(Debug, Parser)]
#[command(name = "vedetta", version, after_help = exit::HELP)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Up(up::Up),
    Kv(kv::Kv),
    Job(job::Job),
    Queue(queue::Queue),
    Worker(worker::Worker),
    Supervise(supervise::Supervise),
    Top(top::Top),
    Watcher(watcher::Watcher),
    Stage(stage::Stage),
    User(user::User),
    Token(token::Token),
    Doctor(doctor::Doctor),
    Backup(backup::Backup),
    Completions(completions::Completions),
}

fn main() -> ExitCode {
    let out = &mut std::io::stdout().lock();
    let done = match Cli::parse().command {
        Command::Up(up) => up.run(),
        Command::Kv(kv) => kv.run(out),
        Command::Job(job) => job.run(out),
        Command::Queue(queue) => queue.run(out),
        Command::Worker(worker) => worker.run(out),
        Command::Supervise(supervise) => supervise.run(),
        Command::Top(top) => top.run(out),
        Command::Watcher(watcher) => watcher.run(out),
        Command::Stage(stage) => stage.run(out),
        Command::User(user) => user.run(out),
        Command::Token(token) => token.run(out),
        Command::Doctor(doctor) => doctor.run(out),
        Command::Backup(backup) => backup.run(out),
        Command::Completions(completions) => completions.run(out),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => exit::report(&error),
    }
}
