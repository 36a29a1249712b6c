//! The few numbers we print.

use std::collections::HashMap;
use std::ffi::OsString;
use std::time::Duration;

/// Of an even count the mean of the middle two.
pub(crate) fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    if values.len().is_multiple_of(2) {
        values[middle - 1].midpoint(values[middle])
    } else {
        values[middle]
    }
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

pub(crate) fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// The CPU time each thread of a process has used, with the thread's name.
pub(crate) struct Cpu(HashMap<OsString, (String, Duration)>);

impl Cpu {
    /// Of this process.
    pub(crate) fn now() -> anyhow::Result<Self> {
        Self::of_process(std::process::id())
    }

    pub(crate) fn of_process(id: u32) -> anyhow::Result<Self> {
        let mut threads = HashMap::new();
        for task in std::fs::read_dir(format!("/proc/{id}/task"))? {
            let task = task?;
            // A thread may end while we look at it.
            let (Ok(name), Ok(line)) = (
                std::fs::read_to_string(task.path().join("comm")),
                std::fs::read_to_string(task.path().join("schedstat")),
            ) else {
                continue;
            };
            let ran: u64 = line.split_whitespace().next().unwrap_or("0").parse()?;
            let used = (name.trim().to_owned(), Duration::from_nanos(ran));
            threads.insert(task.file_name(), used);
        }
        Ok(Self(threads))
    }

    /// Of the threads with that name, since they began.
    pub(crate) fn of(&self, name: &str) -> Duration {
        self.0.values().filter(|(thread, _)| thread == name).map(|(_, used)| *used).sum()
    }

    /// Of all threads that are still there, since then. By thread, because one that ended meanwhile would
    /// take off all it ever used.
    pub(crate) fn since(&self, before: &Self) -> Duration {
        let used_before =
            |id| before.0.get(id).map_or(Duration::ZERO, |(_, used): &(String, Duration)| *used);
        self.0.iter().map(|(id, (_, used))| used.saturating_sub(used_before(id))).sum()
    }
}

/// Resident memory of this process in bytes.
pub(crate) fn resident() -> anyhow::Result<u64> {
    let statm = std::fs::read_to_string("/proc/self/statm")?;
    let pages: u64 = statm.split_whitespace().nth(1).unwrap_or("0").parse()?;
    Ok(pages * 4096)
}

#[cfg(test)]
mod tests {
    use super::median;

    #[test]
    fn the_median_of_an_even_count_lies_between_the_middle_two() {
        for (mut values, expected) in [
            (vec![3.0], 3.0),
            (vec![4.0, 1.0], 2.5),
            (vec![9.0, 1.0, 2.0], 2.0),
            (vec![8.0, 1.0, 4.0, 2.0], 3.0),
        ] {
            assert!((median(&mut values) - expected).abs() < f64::EPSILON, "{values:?}");
        }
    }
}
