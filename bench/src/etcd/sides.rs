//! Both sides in turns, and the line that shows them.

use std::time::Duration;

use crate::figures::{median, millis, quantile, rate};

/// What one side did in one round.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Figures {
    /// Calls answered, or events delivered, per second.
    pub(crate) rate: f64,
    /// Latency in ms.
    pub(crate) p50: f64,
    pub(crate) p99: f64,
    pub(crate) most: f64,
    /// CPU of the server for each, in µs.
    pub(crate) cpu: f64,
}

impl Figures {
    pub(crate) fn new(
        took: &mut [Duration],
        time: Duration,
        cpu: Duration,
    ) -> anyhow::Result<Self> {
        anyhow::ensure!(!took.is_empty(), "nothing was done in the time given");
        Ok(Self {
            rate: rate(took.len() as u64, time),
            p50: millis(quantile(took, 0.5)),
            p99: millis(quantile(took, 0.99)),
            most: millis(quantile(took, 1.0)),
            cpu: 1e6 / rate(took.len() as u64, cpu),
        })
    }
}

/// Rounds of etcd and of Vedetta, by turns.
#[derive(Default)]
pub(crate) struct Rounds(pub(crate) Vec<(Figures, Figures)>);

impl Rounds {
    pub(crate) fn etcd(&self, figure: fn(&Figures) -> f64) -> f64 {
        median(&mut self.0.iter().map(|(etcd, _)| figure(etcd)).collect::<Vec<_>>())
    }

    pub(crate) fn ours(&self, figure: fn(&Figures) -> f64) -> f64 {
        median(&mut self.0.iter().map(|(_, ours)| figure(ours)).collect::<Vec<_>>())
    }

    /// Ours over etcd's of the same round.
    pub(crate) fn ratio(&self, figure: fn(&Figures) -> f64) -> f64 {
        let each = self.0.iter().map(|(etcd, ours)| figure(ours) / figure(etcd));
        median(&mut each.collect::<Vec<_>>())
    }
}
