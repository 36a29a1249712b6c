use std::error::Error;
use std::fmt;
use std::future::Future;
use std::num::NonZeroU32;
use std::str::FromStr;
use std::time::Duration;

use vedetta_core::Backoff;

/// What went wrong in a user's own code.
pub type BoxError = Box<dyn Error + Send + Sync>;

/// How often an entity was saved. A row of version 3 is the third that was saved under its id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Version(pub i64);

impl Version {
    /// The one after.
    #[must_use]
    pub fn next(self) -> Self {
        Self(self.0 + 1)
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Something that goes through stages.
pub trait Entity: Clone + Send + Sync + 'static {
    /// What tells it from the others; the text it is written as must give it back.
    type Id: Clone + fmt::Display + FromStr<Err: fmt::Display> + Send + Sync + 'static;

    /// Which one it is.
    fn id(&self) -> Self::Id;

    /// The version it was read at. Of a new one: the default.
    fn version(&self) -> Version;

    /// Called before it is saved, with the version to save.
    fn set_version(&mut self, version: Version);
}

/// One thing that is done for entities.
pub trait Stage<E: Entity>: Send + Sync + 'static {
    /// Its name. Records are kept under it: to rename a stage is to begin a new one.
    fn name(&self) -> &str;

    /// Whether this entity needs it now. Asked after each change of the entity.
    fn should_process_now(&self, entity: &E) -> bool;

    /// Does it. May be repeated: after a failure, a crash, or a change made meanwhile.
    fn process(&self, entity: E) -> impl Future<Output = Result<Visit<E>, BoxError>> + Send;

    /// How much of it at once, how long, how often.
    fn limits(&self) -> Limits {
        Limits::default()
    }
}

/// What a stage made of an entity.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum Visit<E> {
    /// Nothing to save.
    Untouched {
        /// When to come back, if at all.
        again: Option<Duration>,
    },
    /// Save this, unless somebody else saved meanwhile: then the stage runs again on what they saved.
    Updated {
        /// What to save.
        entity: E,
        /// When to come back, if at all. The change may bring it here earlier.
        again: Option<Duration>,
    },
}

impl<E> Visit<E> {
    /// Nothing to save, nothing more to do.
    pub fn untouched() -> Self {
        Self::Untouched { again: None }
    }

    /// Save this.
    pub fn updated(entity: E) -> Self {
        Self::Updated { entity, again: None }
    }

    /// And come back after `delay`.
    pub fn again(self, delay: Duration) -> Self {
        let again = Some(delay);
        match self {
            Self::Untouched { .. } => Self::Untouched { again },
            Self::Updated { entity, .. } => Self::Updated { entity, again },
        }
    }
}

/// The limits of a stage, in each process that works it.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Entities at once.
    pub parallel: NonZeroU32,
    /// How long one may take.
    pub timeout: Duration,
    /// The waits after failures.
    pub backoff: Backoff,
    /// After so many failures in a row a record is set aside, until somebody asks for it to be tried again
    /// or the entity changes.
    pub tries: NonZeroU32,
}

impl Default for Limits {
    /// 16 at once, five minutes, from 100 ms to 10 s between tries, 20 of them.
    fn default() -> Self {
        Self {
            parallel: NonZeroU32::new(16).expect("not zero"),
            timeout: Duration::from_secs(300),
            backoff: Backoff::default(),
            tries: NonZeroU32::new(20).expect("not zero"),
        }
    }
}
