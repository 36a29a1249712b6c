//! The `[watch.NAME]` tables: watchers that run a command.

use std::num::NonZeroU32;
use std::time::Duration;

use serde::Deserialize;
use vedetta::core::Source;
use vedetta::runtime::{Command, Declared, Keys, Watcher, Watching};

use super::{ConfigError, Own};

#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct Watch {
    prefix: Prefix,
    run: Run,
    key_types: Option<KeyTypes>,
    quiet: Option<KeyTypes>,
    #[serde(default = "parallel")]
    parallel: NonZeroU32,
    #[serde(default = "timeout")]
    timeout: Time,
    resync: Option<Time>,
}

/// Each is a process.
fn parallel() -> NonZeroU32 {
    NonZeroU32::new(8).expect("it is not zero")
}

fn timeout() -> Time {
    Time(Duration::from_secs(300))
}

impl Watch {
    /// What the types of the values cannot say.
    pub(super) fn check(&self, name: &Name) -> Result<(), ConfigError> {
        let (Some(heeded), Some(quiet)) = (&self.key_types, &self.quiet) else { return Ok(()) };
        match quiet.0.iter().find(|quiet| !heeded.0.contains(quiet)) {
            Some(unheeded) => Err(ConfigError::Quiet(name.0.clone(), unheeded.clone())),
            None => Ok(()),
        }
    }

    /// What is run: a path if there is a slash in it.
    pub(crate) fn program(&self) -> &str {
        &self.run.program
    }

    /// Starts it on a source.
    pub(crate) fn start(&self, name: &Name, source: impl Source, own: &Own) -> Watching<Keys> {
        let Run { program, arguments } = self.run.clone();
        let command = own.tell(Command::new(program, arguments, self.timeout.0));
        let quiet = self.quiet.iter().flat_map(|types| types.0.iter().cloned());
        let mut watcher = Watcher::new(self.prefix.0.clone()).parallel(self.parallel).quiet(quiet);
        if let Some(types) = &self.key_types {
            watcher = watcher.key_types(types.0.iter().cloned());
        }
        if let Some(period) = self.resync {
            watcher = watcher.resync_every(period.0);
        }
        Declared { name: name.0.clone(), command }.start(watcher, source)
    }
}

/// What a watcher is called: part of an address and of the environment.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(try_from = "String")]
pub(crate) struct Name(pub(crate) String);

impl TryFrom<String> for Name {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let is_plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
        if (1..=64).contains(&text.len()) && text.chars().all(is_plain) {
            return Ok(Self(text));
        }
        Err(format!(
            "{text:?} cannot be the name of a watcher: use up to 64 letters, digits, - and _"
        ))
    }
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(try_from = "String")]
struct Prefix(String);

impl TryFrom<String> for Prefix {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        if text.is_empty() {
            return Err(
                "the prefix is empty, which is every key: give one such as \"/rooms/\"".into()
            );
        }
        if !text.ends_with('/') {
            return Err(format!(
                "the prefix {text:?} ends within a name: did you mean \"{text}/\"?"
            ));
        }
        Ok(Self(text))
    }
}

/// A program and its arguments.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(try_from = "Vec<String>")]
pub(super) struct Run {
    pub(super) program: String,
    pub(super) arguments: Vec<String>,
}

impl TryFrom<Vec<String>> for Run {
    type Error = &'static str;

    fn try_from(words: Vec<String>) -> Result<Self, Self::Error> {
        if words.iter().any(|word| word.contains('\0')) {
            return Err("run has a NUL character, which no argument can have");
        }
        let mut words = words.into_iter();
        match words.next().filter(|program| !program.is_empty()) {
            Some(program) => Ok(Self { program, arguments: words.collect() }),
            None => {
                Err("run names no program: give it and its arguments, such as [\"./on-room.sh\"]")
            }
        }
    }
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(try_from = "Vec<String>")]
struct KeyTypes(Vec<String>);

impl TryFrom<Vec<String>> for KeyTypes {
    type Error = String;

    fn try_from(types: Vec<String>) -> Result<Self, String> {
        if types.is_empty() {
            return Err("the list of key types is empty: leave it out, or name some".into());
        }
        match types.iter().find(|key_type| key_type.is_empty() || key_type.contains('/')) {
            Some(wrong) => Err(format!(
                "{wrong:?} is not a key type: that is what follows the last slash of a key"
            )),
            None => Ok(Self(types)),
        }
    }
}

/// A time to wait, for example `30s` or `5m`.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(try_from = "String")]
pub(crate) struct Time(pub(crate) Duration);

/// The clock cannot count to the end of time.
pub(super) const LONGEST: Duration = Duration::from_secs(366 * 24 * 3600);

impl TryFrom<String> for Time {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        match humantime::parse_duration(&text) {
            Ok(time) if !time.is_zero() && time <= LONGEST => Ok(Self(time)),
            _ => Err(format!(
                "{text:?} is not a time such as \"30s\" or \"5m\", above zero and up to a year"
            )),
        }
    }
}
