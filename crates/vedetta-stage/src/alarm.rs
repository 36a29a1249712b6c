//! Wakes a stage at a time that is milliseconds away, where a timer of the runtime is up to two of them late.
//!
//! ```text
//! asked for ──timer──► the last two milliseconds ──a thread that sleeps──► rings
//! ```
//!
//! There is one thread at most, whoever waits and however often. If it cannot be had the timer rings.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

/// So late a timer may be.
const LATE: Duration = Duration::from_millis(2);

/// Rings once for the earliest time that was asked for.
#[derive(Default)]
pub(crate) struct Alarm(Arc<Shared>);

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    /// For who waits.
    changed: Notify,
    /// For the thread: it was to sleep for longer.
    earlier: Condvar,
}

#[derive(Default)]
struct State {
    /// When to ring.
    at: Option<Instant>,
    /// A thread sleeps until then.
    asleep: Option<Instant>,
    /// One did: what is left then, with a clock that stands still, is the timer's.
    slept: Option<Instant>,
}

impl Alarm {
    /// Rings then, if not before.
    pub(crate) fn no_later_than(&self, at: Instant) {
        let mut state = self.0.state.lock();
        if state.at.is_some_and(|before| before <= at) {
            return;
        }
        state.at = Some(at);
        if let Some(asleep) = state.asleep.as_mut().filter(|asleep| at < **asleep) {
            *asleep = at;
            self.0.earlier.notify_one();
        }
        drop(state);
        self.0.changed.notify_one();
    }

    /// Until it rings; at once if the time is over. For one who waits; a dropped future has heard nothing.
    pub(crate) async fn rung(&self) {
        loop {
            let timer = {
                let mut state = self.0.state.lock();
                let left = state.at.map(|at| (at, at.saturating_duration_since(Instant::now())));
                match left {
                    None => None,
                    Some((_, Duration::ZERO)) => {
                        state.at = None;
                        return;
                    }
                    Some((at, left)) if left > LATE => Some(at - LATE),
                    Some((at, _)) => {
                        self.sleep(&mut state, at);
                        Some(at)
                    }
                }
            };
            tokio::select! {
                () = self.0.changed.notified() => {}
                () = sleep_until(timer.unwrap_or_else(Instant::now)), if timer.is_some() => {}
            }
        }
    }

    fn sleep(&self, state: &mut State, at: Instant) {
        if state.asleep.is_none() && state.slept != Some(at) {
            state.asleep = Some(at);
            let shared = Arc::clone(&self.0);
            tokio::task::spawn_blocking(move || shared.sleep());
        }
    }
}

impl Shared {
    fn sleep(&self) {
        let mut state = self.state.lock();
        while let Some(until) = state.asleep {
            let left = until.saturating_duration_since(Instant::now());
            if self.earlier.wait_for(&mut state, left).timed_out() {
                break;
            }
        }
        state.slept = state.asleep.take();
        drop(state);
        self.changed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[tokio::test]
    async fn it_rings_once_and_not_before_its_time() {
        let alarm = Alarm::default();
        for left in [Duration::ZERO, MS / 10, MS, 3 * MS, 20 * MS] {
            let at = Instant::now() + left;
            alarm.no_later_than(at);
            alarm.rung().await;
            assert!(Instant::now() >= at, "{left:?}");
            assert!(alarm.rung().now_or_never().is_none(), "{left:?}: it has rung");
        }
    }

    #[tokio::test]
    async fn of_several_times_the_earliest_counts_also_while_somebody_waits() {
        let alarm = Alarm::default();
        let (now, hour) = (Instant::now(), Duration::from_secs(3600));
        alarm.no_later_than(now + 2 * hour);
        alarm.no_later_than(now + 3 * hour);
        let waits = alarm.rung();
        tokio::pin!(waits);
        for at in [now + hour, Instant::now() + 2 * MS, Instant::now() + MS] {
            assert!(waits.as_mut().now_or_never().is_none());
            alarm.no_later_than(at);
        }
        waits.await;
        assert!(alarm.rung().now_or_never().is_none(), "the later ones are forgotten");
    }

    #[tokio::test]
    async fn who_comes_and_goes_leaves_one_thread_at_most() {
        let alarm = Alarm::default();
        let at = Instant::now() + LATE;
        for n in 0..100 {
            // Each earlier than the one before.
            alarm.no_later_than(at - n * MS / 100);
            let _ = alarm.rung().now_or_never();
            assert!(Arc::strong_count(&alarm.0) <= 2, "ours, and that of a thread");
        }
    }

    #[test]
    fn if_there_is_no_thread_to_be_had_the_timer_rings() {
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = runtime.enable_time().max_blocking_threads(1).build().unwrap();
        runtime.block_on(async {
            let (end, ended) = std::sync::mpsc::channel::<()>();
            let busy = tokio::task::spawn_blocking(move || ended.recv());
            let alarm = Alarm::default();
            for _ in 0..3 {
                let at = Instant::now() + MS;
                alarm.no_later_than(at);
                alarm.rung().await;
                assert!(Instant::now() >= at);
            }
            drop(end);
            let _ = busy.await;
        });
    }

    /// As in the tests of a program that uses this.
    #[tokio::test(start_paused = true)]
    async fn with_a_clock_that_stands_still_it_rings_as_well() {
        let alarm = Alarm::default();
        for left in [MS, 2 * MS, 3 * MS, 5000 * MS] {
            let at = Instant::now() + left;
            alarm.no_later_than(at);
            alarm.rung().await;
            assert!(Instant::now() >= at, "{left:?}");
        }
    }
}
