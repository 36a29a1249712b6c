//! Jobs under load while workers and servers are killed, workers frozen and connections cut: none is lost,
//! none begins again without a reason, and what has an effect in its own transaction has it once.
//!
//! `cargo run -p torture -- jobs` is the long version.

use std::num::NonZeroU32;
use std::time::Duration;

use torture::bed;
use torture::jobs::{Backend, Lie, Report, SLOTS, Setup, run};

fn setup(on: Backend) -> Setup {
    Setup {
        on,
        jobs: 1_500,
        per_second: 300,
        between_faults: Some(Duration::from_millis(250)),
        workers: 3,
        slots: SLOTS,
        lease: Duration::from_millis(1_500),
        seed: bed::seed(),
        program: env!("CARGO_BIN_EXE_torture").into(),
        lie: None,
    }
}

async fn survives(setup: Setup) -> Report {
    let report = run(&setup).await;
    eprintln!("{report}");
    assert!(report.violations.is_empty(), "TORTURE_SEED={}: {report}", bed::seed());
    assert!(report.figures["acknowledged"] >= 1_500, "{report}");
    for what in ["worker killed", "server killed", "worker frozen", "connections ended"] {
        assert!(report.faults[what] > 0, "{report}");
    }
    report
}

/// What a run without faults says when something is done wrong on purpose.
async fn caught(on: Backend, lie: Lie, word: &str) {
    let told = Setup { jobs: 300, per_second: 1_000, between_faults: None, ..setup(on) };
    let report: Report = run(&Setup { lie: Some(lie), ..told }).await;
    assert!(report.violations.iter().any(|violation| violation.contains(word)), "{report}");
}

#[tokio::test]
async fn no_job_of_the_embedded_queue_is_lost_or_begins_again_without_a_reason() {
    survives(setup(Backend::Sqlite)).await;
}

#[tokio::test]
async fn no_job_on_postgres_is_lost_or_begins_again_without_a_reason_and_effects_happen_once() {
    survives(setup(Backend::Postgres)).await;
}

#[tokio::test]
async fn no_job_of_a_stream_is_lost_or_begins_again_without_a_reason() {
    survives(setup(Backend::Nats)).await;
}

#[tokio::test]
async fn no_job_of_a_stream_is_lost_or_begins_again_while_several_pulls_are_open_at_once() {
    let wide = Setup { slots: NonZeroU32::new(1024).unwrap(), workers: 2, ..setup(Backend::Nats) };
    let report = survives(Setup { per_second: u64::MAX, ..wide }).await;
    assert!(report.figures["pulls while another was open"] > 0, "{report}");
}

#[tokio::test]
async fn a_job_that_was_only_said_to_be_done_is_noticed() {
    caught(Backend::Sqlite, Lie::Skip, "had not begun").await;
}

#[tokio::test]
async fn a_job_that_is_done_twice_is_noticed() {
    caught(Backend::Sqlite, Lie::Twice, "began twice").await;
}

#[tokio::test]
async fn a_job_that_was_taken_on_and_dropped_is_noticed() {
    caught(Backend::Sqlite, Lie::Lose, "is lost").await;
    caught(Backend::Postgres, Lie::Lose, "is lost").await;
    caught(Backend::Nats, Lie::Lose, "is lost").await;
}

#[tokio::test]
async fn an_end_that_was_acknowledged_and_not_stored_is_noticed() {
    caught(Backend::Sqlite, Lie::Forget, "after its end was acknowledged").await;
    caught(Backend::Postgres, Lie::Forget, "after its end was acknowledged").await;
    caught(Backend::Nats, Lie::Forget, "after its end was acknowledged").await;
}

#[tokio::test]
async fn an_effect_that_happened_twice_is_noticed() {
    caught(Backend::Postgres, Lie::Careless, "has 2 effects").await;
}
