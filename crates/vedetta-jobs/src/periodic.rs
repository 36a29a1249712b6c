//! Jobs that are asked for again and again: at each tick once, however many servers tick.
//!
//! Ticks are times, not counts: every server computes the same ones, and the database takes a job on for the
//! first that says so, see [`Ledger::tick`]. A server that was away makes up for the last tick it missed, and
//! not for those before.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use croner::Cron;
use croner::parser::{CronParser, Seconds};
use jiff::tz::TimeZone;
use jiff::{Timestamp, Zoned};
use tokio_util::task::AbortOnDropHandle;
use vedetta_core::{Backoff, explain};

use crate::job::{JobsError, NewJob, check_name};
use crate::port::Ledger;

/// The waits while the jobs cannot be reached.
const AGAIN: Backoff =
    Backoff { first: Duration::from_millis(100), most: Duration::from_secs(10), jitter: 0.2 };

/// What is too long ago is looked for every so often: a clock may be set, and a machine sleep.
const LOOK: Duration = Duration::from_secs(30);

/// When something is to be done.
#[derive(Clone)]
pub enum Every {
    /// Again and again after so long: at the multiples of it since 1970.
    Each(Duration),
    /// When the clock of a place fits.
    Cron(Box<Cron>, TimeZone),
}

impl fmt::Debug for Every {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Each(period) => write!(f, "every {}", humantime::format_duration(*period)),
            Self::Cron(cron, zone) => {
                write!(f, "{} {}", cron.as_str(), zone.iana_name().unwrap_or("UTC"))
            }
        }
    }
}

impl Every {
    /// Every so often, a second or more.
    pub fn each(period: Duration) -> Result<Self, JobsError> {
        if period < Duration::from_secs(1) {
            return Err(JobsError::Invalid("a period is a second or more".into()));
        }
        Ok(Self::Each(period))
    }

    /// Minute, hour, day of the month, month, day of the week, as cron has them; in this time zone, such as
    /// `Europe/Rome`, or in UTC.
    pub fn cron(pattern: &str, zone: Option<&str>) -> Result<Self, JobsError> {
        let cron = CronParser::builder().seconds(Seconds::Disallowed).build().parse(pattern);
        let cron = cron.map_err(|error| {
            let what = format!("{pattern:?} is no cron pattern of five fields: {error}");
            JobsError::Invalid(what)
        })?;
        let zone = zone.map_or(Ok(TimeZone::UTC), TimeZone::get);
        let zone =
            zone.map_err(|error| JobsError::Invalid(format!("no such time zone: {error}")))?;
        Ok(Self::Cron(Box::new(cron), zone))
    }

    /// The last tick up to then.
    pub fn last(&self, now: SystemTime) -> Option<SystemTime> {
        match self {
            Self::Each(period) => {
                let since = now.duration_since(SystemTime::UNIX_EPOCH).ok()?;
                Some(SystemTime::UNIX_EPOCH + multiple(since, *period)?)
            }
            Self::Cron(cron, zone) => {
                let now = zoned(now, zone)?;
                cron.find_previous_occurrence(&now, true).ok().map(|at| at.timestamp().into())
            }
        }
    }

    /// The first tick after then.
    pub fn next(&self, now: SystemTime) -> Option<SystemTime> {
        match self {
            Self::Each(period) => self.last(now)?.checked_add(*period),
            Self::Cron(cron, zone) => {
                let now = zoned(now, zone)?;
                cron.find_next_occurrence(&now, false).ok().map(|at| at.timestamp().into())
            }
        }
    }
}

fn multiple(since: Duration, period: Duration) -> Option<Duration> {
    let whole = since.as_nanos() / period.as_nanos().max(1) * period.as_nanos();
    let seconds = u64::try_from(whole / 1_000_000_000).ok()?;
    Some(Duration::new(seconds, u32::try_from(whole % 1_000_000_000).ok()?))
}

fn zoned(time: SystemTime, zone: &TimeZone) -> Option<Zoned> {
    Some(Timestamp::try_from(time).ok()?.to_zoned(zone.clone()))
}

/// A job that is asked for again and again.
#[derive(Debug, Clone)]
pub struct Periodic {
    /// What its ticks are known by, to every server.
    pub name: String,
    /// When.
    pub every: Every,
    /// What.
    pub job: NewJob,
}

/// How long jobs that are over are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Retention {
    /// Done or called off.
    pub completed: Duration,
    /// Dead.
    pub failed: Duration,
}

impl Default for Retention {
    fn default() -> Self {
        let day = Duration::from_secs(24 * 3600);
        Self { completed: 7 * day, failed: 30 * day }
    }
}

/// Asks for periodic jobs and removes old ones, until dropped. Every server may do so.
#[derive(Debug)]
pub struct Housekeeping {
    _tasks: Vec<AbortOnDropHandle<()>>,
}

impl Housekeeping {
    /// From now on.
    pub fn start(
        ledger: &Arc<dyn Ledger>,
        periodic: Vec<Periodic>,
        retention: Retention,
    ) -> Result<Self, JobsError> {
        for periodic in &periodic {
            check_name("periodic job", &periodic.name)?;
            periodic.job.check()?;
        }
        let spawn = |task| AbortOnDropHandle::new(task);
        let mut tasks = vec![spawn(tokio::spawn(prune(Arc::clone(ledger), retention)))];
        for periodic in periodic {
            tasks.push(spawn(tokio::spawn(tick(Arc::clone(ledger), periodic))));
        }
        Ok(Self { _tasks: tasks })
    }
}

async fn tick(ledger: Arc<dyn Ledger>, periodic: Periodic) {
    let mut failures = 0;
    // What was due before it was first heard of is not made up for.
    let mut since = loop {
        match ledger.last_tick(&periodic.name).await {
            Ok(last) => break last.unwrap_or_else(SystemTime::now),
            Err(error) => trouble(&periodic.name, &error, &mut failures).await,
        }
    };
    loop {
        let now = SystemTime::now();
        if let Some(at) = periodic.every.last(now).filter(|at| *at > since) {
            match ledger.tick(&periodic.name, at, &periodic.job).await {
                Ok(_) => (since, failures) = (at, 0),
                Err(error) => trouble(&periodic.name, &error, &mut failures).await,
            }
            continue;
        }
        let wait = periodic.every.next(now).and_then(|next| next.duration_since(now).ok());
        tokio::time::sleep(wait.unwrap_or(LOOK).min(LOOK)).await;
    }
}

async fn trouble(name: &str, error: &JobsError, failures: &mut u32) {
    if *failures == 0 {
        tracing::warn!(periodic = name, error = explain(error), "a tick has to wait");
    }
    tokio::time::sleep(AGAIN.delay(*failures, fastrand::f64())).await;
    *failures = failures.saturating_add(1);
}

async fn prune(ledger: Arc<dyn Ledger>, retention: Retention) {
    loop {
        match ledger.prune(retention.completed, retention.failed).await {
            // There may be more; others go first.
            Ok(1..) => tokio::time::sleep(Duration::from_millis(50)).await,
            Ok(0) => tokio::time::sleep(LOOK).await,
            Err(error) => {
                tracing::warn!(error = explain(&error), "old jobs cannot be removed");
                tokio::time::sleep(LOOK).await;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn time(text: &str) -> SystemTime {
        text.parse::<Timestamp>().unwrap().into()
    }

    fn around(every: &Every, now: &str) -> [String; 2] {
        let shown = |time: Option<SystemTime>| {
            humantime::format_rfc3339_seconds(time.expect("there is one")).to_string()
        };
        [shown(every.last(time(now))), shown(every.next(time(now)))]
    }

    #[test]
    fn ticks_are_the_same_on_every_server() {
        let each = Every::each(Duration::from_secs(900)).unwrap();
        let ticks = ["2026-11-16T10:15:00Z", "2026-11-16T10:30:00Z"];
        assert_eq!(around(&each, "2026-11-16T10:15:00Z"), ticks);
        assert_eq!(around(&each, "2026-11-16T10:29:59.999Z"), ticks);
        let nightly = Every::cron("0 3 * * *", None).unwrap();
        let ticks = ["2026-11-16T03:00:00Z", "2026-11-17T03:00:00Z"];
        assert_eq!(around(&nightly, "2026-11-16T03:00:00Z"), ticks);
        assert_eq!(around(&nightly, "2026-11-17T02:59:59Z"), ticks);
    }

    #[test]
    fn a_pattern_is_read_by_the_clock_of_its_place() {
        let rome = Every::cron("30 9 * * MON-FRI", Some("Europe/Rome")).unwrap();
        // In winter Rome is an hour ahead, in summer two.
        let [_, next] = around(&rome, "2026-11-14T12:00:00Z");
        assert_eq!(next, "2026-11-16T08:30:00Z");
        let [_, next] = around(&rome, "2026-07-06T00:00:00Z");
        assert_eq!(next, "2026-07-06T07:30:00Z");
    }

    #[test]
    fn no_night_has_two_ticks_or_none_when_the_clock_is_put_back_or_forward() {
        let rome = Every::cron("30 2 * * *", Some("Europe/Rome")).unwrap();
        for (from, to) in [
            ("2026-10-24T12:00:00Z", "2026-10-26T12:00:00Z"), // back on the 25th
            ("2026-03-28T12:00:00Z", "2026-03-30T12:00:00Z"), // forward on the 29th
        ] {
            let (mut now, end, mut ticks) = (time(from), time(to), 0);
            while let Some(next) = rome.next(now).filter(|next| *next < end) {
                (now, ticks) = (next, ticks + 1);
            }
            assert_eq!(ticks, 2, "from {from}");
        }
    }

    #[test]
    fn what_is_no_time_is_refused() {
        for (pattern, zone) in
            [("* * * *", None), ("61 * * * *", None), ("* * * * *", Some("Mars/Base"))]
        {
            assert!(matches!(Every::cron(pattern, zone), Err(JobsError::Invalid(_))), "{pattern}");
        }
        assert!(matches!(Every::each(Duration::ZERO), Err(JobsError::Invalid(_))));
    }
}
