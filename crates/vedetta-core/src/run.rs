use std::any::Any;
use std::error::Error;
use std::fmt;
use std::time::Duration;

use crate::Moment;

/// What happens to a piece of work. The list is closed: whoever shows or counts runs covers them all.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RunEvent {
    /// It is to run at this time.
    Due(Moment),
    /// It runs, after so many failures.
    Started {
        /// Failures since the last success or change.
        failures: u32,
    },
    /// It still runs.
    Running,
    /// It ended well.
    Done {
        /// How long it took.
        took: Duration,
        /// It asked to run again after that long.
        again: Option<Duration>,
    },
    /// It ended badly and will run again.
    Failed {
        /// How long it took.
        took: Duration,
        /// Why.
        why: Failure,
        /// When it runs again.
        again: Moment,
    },
    /// It ended badly and will not run again by itself.
    Dead {
        /// How long it took.
        took: Duration,
        /// Why.
        why: Failure,
    },
    /// It was ended from outside: whether it runs again is not this run's business.
    Cancelled,
}

/// Why a run failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Failure {
    /// It said so.
    Error(String),
    /// It panicked.
    Panic(String),
    /// It took longer than it may.
    Timeout(Duration),
}

impl Failure {
    /// What a panic said.
    pub fn of_panic(panic: &(dyn Any + Send)) -> Self {
        let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
        let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
        Self::Panic(text.unwrap_or_else(|| "no message".into()))
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Error(error) => f.write_str(error),
            Self::Panic(message) => write!(f, "it panicked: {message}"),
            Self::Timeout(limit) => write!(f, "it took longer than {limit:?}"),
        }
    }
}

/// An error with its causes, in one line; a cause that was said already is left out.
pub fn explain(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let why = error.to_string();
        if !text.ends_with(&why) {
            text = format!("{text}: {why}");
        }
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    struct Told(&'static str, Option<Box<Told>>);

    impl fmt::Display for Told {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str(self.0)
        }
    }

    impl Error for Told {
        fn source(&self) -> Option<&(dyn Error + 'static)> {
            self.1.as_deref().map(|cause| cause as _)
        }
    }

    #[test]
    fn a_cause_is_told_once_also_if_the_error_above_has_told_it() {
        let error = |texts: &[&'static str]| {
            let told =
                texts.iter().rev().fold(None, |below, text| Some(Box::new(Told(text, below))));
            explain(&*told.unwrap())
        };
        assert_eq!(error(&["no", "why", "deeper"]), "no: why: deeper");
        assert_eq!(error(&["no", "cannot: refused", "refused"]), "no: cannot: refused");
        assert_eq!(error(&["refused", "refused", "further"]), "refused: further");
    }
}
