//! The store and a naive model of it are put through the same made-up life; they must agree on every
//! answer and on every watch stream. `PROPTEST_CASES` says how many lives (2,000 unless told).

mod plan;
mod reference;
mod run;

use std::cell::Cell;

use proptest::test_runner::{Config, TestCaseError, TestRunner};

#[test]
fn random_operations_with_restarts_and_compactions_agree_with_a_naive_model() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let told = std::env::var("PROPTEST_CASES").is_ok();
    let config = Config {
        cases: if told { Config::default().cases } else { 2_000 },
        failure_persistence: None,
        max_shrink_iters: 2_000,
        max_shrink_time: 120_000, // what hangs takes long to shrink
        ..Config::default()
    };
    let (cases, operations) = (Cell::new(0), Cell::new(0));
    let agreed = TestRunner::new(config).run(&plan::steps(), |steps| {
        cases.set(cases.get() + 1);
        operations.set(operations.get() + steps.len());
        runtime.block_on(run::live(steps)).map_err(TestCaseError::fail)
    });
    println!("{} operations in {} cases", operations.get(), cases.get());
    if let Err(why) = agreed {
        panic!("{why}");
    }
}
