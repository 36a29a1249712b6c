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

/// What happens to a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum JobMove {
    /// A worker takes it.
    Take,
    /// Its worker is done.
    Finish,
    /// Its worker failed, was interrupted or asks for it later, and it may be tried again.
    PutBack,
    /// Its lease lapsed.
    Lapse,
    /// It failed for good.
    Bury,
    /// Somebody calls it off.
    Cancel,
    /// Somebody wants it tried once more.
    Retry,
}

impl JobState {
    /// Every state.
    pub const ALL: [Self; 5] =
        [Self::Waiting, Self::Running, Self::Done, Self::Dead, Self::Cancelled];

    /// Where `step` leads from here; nothing if it may not be taken from here.
    pub fn after(self, step: JobMove) -> Option<Self> {
        match (self, step) {
            (Self::Waiting, JobMove::Take) => Some(Self::Running),
            (Self::Running, JobMove::Finish) => Some(Self::Done),
            (Self::Running, JobMove::PutBack | JobMove::Lapse)
            | (Self::Dead | Self::Cancelled, JobMove::Retry) => Some(Self::Waiting),
            (Self::Waiting | Self::Running, JobMove::Bury) => Some(Self::Dead),
            (Self::Waiting | Self::Running, JobMove::Cancel) => Some(Self::Cancelled),
            _ => None,
        }
    }

    /// Nothing more happens to it by itself.
    pub fn is_over(self) -> bool {
        matches!(self, Self::Done | Self::Dead | Self::Cancelled)
    }
}

#[cfg(test)]
mod tests {
    use super::JobMove::{Bury, Cancel, Finish, Lapse, PutBack, Retry, Take};
    use super::JobState::{Cancelled, Dead, Done, Running, Waiting};
    use super::*;

    #[test]
    fn a_job_moves_only_as_drawn() {
        let moves = [Take, Finish, PutBack, Lapse, Bury, Cancel, Retry];
        let drawn = [
            (Waiting, [Some(Running), None, None, None, Some(Dead), Some(Cancelled), None]),
            (
                Running,
                [None, Some(Done), Some(Waiting), Some(Waiting), Some(Dead), Some(Cancelled), None],
            ),
            (Done, [None; 7]),
            (Dead, [None, None, None, None, None, None, Some(Waiting)]),
            (Cancelled, [None, None, None, None, None, None, Some(Waiting)]),
        ];
        assert_eq!(drawn.map(|(state, _)| state), JobState::ALL);
        for (state, expected) in drawn {
            assert_eq!(moves.map(|step| state.after(step)), expected, "{state:?}");
        }
    }

    #[test]
    fn what_is_over_moves_only_by_hand() {
        for state in JobState::ALL {
            let by_itself = [Take, Finish, PutBack, Lapse, Bury, Cancel];
            let moves = by_itself.iter().any(|step| state.after(*step).is_some());
            assert_eq!(moves, !state.is_over(), "{state:?}");
        }
    }
}
