//! A fleet while its workers, its server, its databases and its clocks fail: it returns to its size, no job is
//! lost, no command acts twice or after its time, no process is left behind.
//!
//! `cargo run -p torture -- fleet` is the long version.

use std::path::Path;
use std::time::Duration;

use torture::bed;
use torture::fleet::{Bus, Keeper, Lie, Report, Setup, run};

fn setup(on: Keeper, bus: Bus) -> Setup {
    // Built with the rest of the workspace; alone with `cargo build -p vedetta-cli`.
    let program = Path::new(env!("CARGO_BIN_EXE_torture")).with_file_name("vedetta");
    Setup {
        on,
        bus,
        time: Duration::from_secs(12),
        between_faults: Duration::from_millis(800),
        workers: 3,
        clocks: true,
        seed: bed::seed(),
        program,
        lie: None,
    }
}

async fn survives(on: Keeper, bus: Bus) {
    let setup = setup(on, bus);
    let report = run(&setup).await.unwrap();
    eprintln!("{report}");
    assert!(report.violations.is_empty(), "TORTURE_SEED={}: {report}", bed::seed());
    for what in setup.faults() {
        assert!(report.faults.get(what).is_some_and(|count| *count > 0), "no {what}: {report}");
    }
    assert!(report.jobs > 50 && report.obeyed > 20, "{report}");
}

/// What a short run says when something is done wrong on purpose.
async fn caught(lie: Lie, word: &str) {
    let told = Setup {
        time: Duration::from_secs(1),
        between_faults: Duration::from_millis(200),
        clocks: false,
        workers: 1,
        lie: Some(lie),
        ..setup(Keeper::Sqlite, Bus::Same)
    };
    let report: Report = run(&told).await.unwrap();
    assert!(report.violations.iter().any(|violation| violation.contains(word)), "{report}");
}

#[tokio::test]
async fn a_fleet_on_the_embedded_file_returns_to_its_size_and_nothing_is_lost_or_done_twice() {
    survives(Keeper::Sqlite, Bus::Same).await;
}

#[tokio::test]
async fn a_fleet_with_its_commands_on_redis_returns_to_its_size_and_nothing_is_lost_or_done_twice()
{
    survives(Keeper::Sqlite, Bus::Redis).await;
}

#[tokio::test]
async fn a_fleet_on_postgresql_returns_to_its_size_and_nothing_is_lost_or_done_twice() {
    survives(Keeper::Postgres, Bus::Same).await;
}

#[tokio::test]
async fn a_command_that_is_handed_out_twice_is_noticed() {
    caught(Lie::Twice, "handed out again").await;
}

#[tokio::test]
async fn a_command_that_holds_for_too_long_is_noticed() {
    caught(Lie::Late, "lives for too long").await;
}

#[tokio::test]
async fn what_a_handler_leaves_behind_is_noticed() {
    caught(Lie::Orphan, "processes are left").await;
}
