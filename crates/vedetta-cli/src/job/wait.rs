use std::io::Write;
use std::thread::sleep;
use std::time::{Duration, Instant};

use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use vedetta::core::JobState;
use vedetta::jobs::wire::Listed;
use vedetta::jobs::{Job, JobId};

use super::{path, show_all};
use crate::client::{Client, ClientError};
use crate::output::{self, Format};

/// Wait until jobs are over, with a progress bar on a terminal; fails unless each of them is done
#[derive(Debug, Args)]
pub(crate) struct Wait {
    /// The jobs
    #[arg(required = true)]
    ids: Vec<JobId>,
}

/// They are looked at this often; less often the longer it takes.
const OFTEN: Duration = Duration::from_millis(50);
const SELDOM: Duration = Duration::from_secs(1);
/// A server that is away for longer is not waited for.
const AWAY: Duration = Duration::from_secs(60);

impl Wait {
    pub(crate) fn run(
        self,
        client: &Client,
        format: Format,
        out: &mut impl Write,
    ) -> anyhow::Result<()> {
        wait(client, format, &self.ids, out)
    }
}

/// Prints them when they are over.
pub(super) fn wait(
    client: &Client,
    format: Format,
    ids: &[JobId],
    out: &mut impl Write,
) -> anyhow::Result<()> {
    let mut jobs = Vec::with_capacity(ids.len());
    for id in ids {
        jobs.push(client.get::<Job>(&path(*id))?);
    }
    // Drawn on stderr, and only if that is a terminal.
    let bar = ProgressBar::new(100 * jobs.len() as u64);
    bar.set_style(ProgressStyle::with_template("{bar:30} {percent:>3}% {wide_msg}")?);
    let (mut pause, mut heard) = (OFTEN, Instant::now());
    loop {
        draw(&bar, &jobs);
        if jobs.iter().all(|job| job.status.is_over()) {
            break;
        }
        sleep(pause);
        pause = (pause * 5 / 4).min(SELDOM);
        for job in jobs.iter_mut().filter(|job| !job.status.is_over()) {
            match client.get(&path(job.id)) {
                Ok(now) => (*job, heard) = (now, Instant::now()),
                // It may be on its way back; the others would wait for it as long.
                Err(ClientError::Unreachable { .. } | ClientError::Refused { status: 503, .. })
                    if heard.elapsed() < AWAY =>
                {
                    break;
                }
                Err(error) => return Err(error.into()),
            }
        }
    }
    bar.finish_and_clear();
    let failed = jobs.iter().filter(|job| job.status != JobState::Done).count();
    show_all(out, format, &Listed { jobs, cursor: None })?;
    anyhow::ensure!(failed == 0, "not done: {failed} of {}", ids.len());
    Ok(())
}

#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "from 0 to 100")]
fn draw(bar: &ProgressBar, jobs: &[Job]) {
    let part = |job: &Job| if job.status.is_over() { 100 } else { (100.0 * job.progress) as u64 };
    bar.set_position(jobs.iter().map(part).sum());
    let over = jobs.iter().filter(|job| job.status.is_over()).count();
    let now = jobs.iter().find(|job| !job.status.is_over());
    let message = now.and_then(|job| job.message.as_deref()).unwrap_or_default();
    bar.set_message(match jobs.len() {
        1 => output::one_line(message),
        all => format!("{over} of {all} {}", output::one_line(message)),
    });
}
