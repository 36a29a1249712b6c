/// Where a job stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum JobState {
    /// For its time, or for somebody to take it.
    Waiting,
    /// Somebody holds its lease.
    Running,
    /// It ended well.
    Done,
    /// It failed for good: it is kept with its error, and may be tried again by hand.
    Dead,
    /// It was called off.
    Cancelled,
}

impl JobState {
    /// Every state.
    pub const ALL: [Self; 5] =
        [Self::Waiting, Self::Running, Self::Done, Self::Dead, Self::Cancelled];

    /// Nothing more happens to it by itself.
    pub fn is_over(self) -> bool {
        matches!(self, Self::Done | Self::Dead | Self::Cancelled)
    }
}
