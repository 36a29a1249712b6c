//! The few numbers we print.

use std::time::Duration;

pub(crate) fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// The value below which `share` of all lie.
pub(crate) fn quantile(values: &mut [Duration], share: f64) -> Duration {
    values.sort_unstable();
    let last = values.len() - 1;
    #[expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    let place = (last as f64 * share).round() as usize;
    values[place.min(last)]
}

#[expect(clippy::cast_precision_loss, reason = "figures for people")]
pub(crate) fn rate(count: u64, time: Duration) -> f64 {
    count as f64 / time.as_secs_f64()
}

/// CPU time used so far by the threads of this process with that name, or by all that still run.
pub(crate) fn cpu_of(thread: Option<&str>) -> anyhow::Result<Duration> {
    let mut total = Duration::ZERO;
    for task in std::fs::read_dir("/proc/self/task")? {
        let task = task?.path();
        // A thread may end while we look at it.
        let (Ok(name), Ok(line)) = (
            std::fs::read_to_string(task.join("comm")),
            std::fs::read_to_string(task.join("schedstat")),
        ) else {
            continue;
        };
        if thread.is_none_or(|thread| thread == name.trim()) {
            let ran: u64 = line.split_whitespace().next().unwrap_or("0").parse()?;
            total += Duration::from_nanos(ran);
        }
    }
    Ok(total)
}

/// Resident memory of this process in bytes.
pub(crate) fn resident() -> anyhow::Result<u64> {
    let statm = std::fs::read_to_string("/proc/self/statm")?;
    let pages: u64 = statm.split_whitespace().nth(1).unwrap_or("0").parse()?;
    Ok(pages * 4096)
}
