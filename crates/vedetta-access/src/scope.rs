//! Where a token is good.
//!
//! A role says how much somebody may do, a scope where: a token needs both.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use serde::{Serialize, Serializer};

/// A part of the API. Which routes belong to it is the caller's question.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Area {
    /// Jobs: added, seen, taken from their queues, kept, settled.
    Jobs,
    /// Queues: seen, paused, drained.
    Queues,
    /// Workers, their supervisors, and what they are told.
    Workers,
    /// Stages and their records.
    Stages,
    /// Watchers.
    Watchers,
    /// Keys, leases, watches and the history of the store.
    Kv,
    /// Numbers of everything, with the names of the queues and watchers that they are of.
    Stats,
    /// All that changes, as it changes, whatever it is.
    Events,
    /// The audit log.
    Audit,
}

impl Area {
    /// All.
    pub const ALL: [Self; 9] = [
        Self::Jobs,
        Self::Queues,
        Self::Workers,
        Self::Stages,
        Self::Watchers,
        Self::Kv,
        Self::Stats,
        Self::Events,
        Self::Audit,
    ];

    /// Its name.
    pub fn word(self) -> &'static str {
        match self {
            Self::Jobs => "jobs",
            Self::Queues => "queues",
            Self::Workers => "workers",
            Self::Stages => "stages",
            Self::Watchers => "watchers",
            Self::Kv => "kv",
            Self::Stats => "stats",
            Self::Events => "events",
            Self::Audit => "audit",
        }
    }
}

impl fmt::Display for Area {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.word())
    }
}

/// The areas that somebody is let into.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Scope {
    /// Every one, also those that are still to come.
    All,
    /// These.
    Only(BTreeSet<Area>),
    /// Stored by a Vedetta that knows more areas than this one: none, as it cannot be told which.
    Unknown(String),
}

/// What stands for [`Scope::All`].
const ALL: &str = "all";

impl Scope {
    /// Whether it has this area.
    pub fn has(&self, area: Area) -> bool {
        match self {
            Self::All => true,
            Self::Only(areas) => areas.contains(&area),
            Self::Unknown(_) => false,
        }
    }

    /// The names of its areas, or `all`.
    pub fn words(&self) -> Vec<&'static str> {
        match self {
            Self::All => vec![ALL],
            Self::Only(areas) => areas.iter().map(|area| area.word()).collect(),
            Self::Unknown(_) => Vec::new(),
        }
    }

    /// As it was stored. It may have been by a Vedetta that knows more areas.
    pub(crate) fn stored(text: String) -> Self {
        text.parse().unwrap_or(Self::Unknown(text))
    }
}

impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown(text) => f.write_str(text),
            known => f.write_str(&known.words().join(",")),
        }
    }
}

impl Serialize for Scope {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_seq(self.words())
    }
}

impl FromStr for Scope {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == ALL {
            return Ok(Self::All);
        }
        let area = |word: &str| {
            let known = Area::ALL.into_iter().find(|area| area.word() == word);
            known.ok_or_else(|| {
                let all = Area::ALL.map(Area::word).join(", ");
                format!("{word:?} is no scope: give all, or some of {all}, with commas")
            })
        };
        text.split(',').map(|word| area(word.trim())).collect::<Result<_, _>>().map(Self::Only)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scope_is_what_was_written_and_nothing_that_is_not_known() {
        for area in Area::ALL {
            let only: Scope = area.word().parse().unwrap();
            let has: Vec<Area> = Area::ALL.into_iter().filter(|one| only.has(*one)).collect();
            assert_eq!(has, [area]);
            assert!(Scope::All.has(area));
        }
        for (text, written) in
            [("all", "all"), ("kv, jobs", "jobs,kv"), ("jobs,jobs", "jobs"), ("audit", "audit")]
        {
            let scope: Scope = text.parse().unwrap();
            assert_eq!(scope.to_string(), written);
            assert_eq!(scope.to_string().parse(), Ok(scope), "as it is stored");
        }
        for text in ["", " ", "jobs,", "Jobs", "jobs all", "all,jobs", "*"] {
            let refused = text.parse::<Scope>().unwrap_err();
            assert!(refused.contains("is no scope") && refused.contains("watchers"), "{refused}");
        }
    }
}
