//! Cases: a name and lines, run on both servers side by side.

use std::fmt::Write as _;
use std::net::SocketAddr;

use crate::support::{Etcd, Ours};

/// A story of requests; each runs under a prefix of its own.
#[derive(Debug, Clone)]
pub(crate) struct Case {
    pub(crate) name: String,
    pub(crate) lines: Vec<String>,
}

/// Reads a table: `== name` begins a case, `#` a comment.
pub(crate) fn parse(table: &str) -> Vec<Case> {
    let mut cases: Vec<Case> = Vec::new();
    for line in table.lines().map(str::trim) {
        if let Some(name) = line.strip_prefix("== ") {
            cases.push(Case { name: name.into(), lines: Vec::new() });
        } else if !line.is_empty() && !line.starts_with('#') {
            cases.last_mut().expect("a case begins with ==").lines.push(line.into());
        }
    }
    cases
}

/// Where the answers of a line were not the same.
#[derive(Debug)]
pub(crate) struct Mismatch {
    /// Which line of the case.
    pub(crate) at: usize,
    pub(crate) etcd: String,
    pub(crate) ours: String,
}

impl Mismatch {
    pub(crate) fn tell(&self, case: &Case) -> String {
        let line = case.lines.get(self.at).map_or("(what is there in the end)", String::as_str);
        let mut text = format!("== {}\n  line {}: {line}\n", case.name, self.at + 1);
        for (who, said) in [("etcd", &self.etcd), ("ours", &self.ours)] {
            for (number, line) in said.lines().enumerate() {
                let who = if number == 0 { who } else { "" };
                let _ = writeln!(text, "    {who:4} {line}");
            }
        }
        text
    }
}

/// Who is compared with the real etcd.
enum Subject {
    Ours(Ours),
    Etcd(Etcd),
}

/// The real etcd, and whoever is compared with it.
pub(crate) struct Servers {
    etcd: Etcd,
    subject: Subject,
}

impl Servers {
    pub(crate) async fn start() -> Self {
        let subject = if std::env::var("VEDETTA_DIFF").is_ok_and(|who| who == "etcd") {
            Subject::Etcd(Etcd::start().await)
        } else {
            Subject::Ours(Ours::start().await)
        };
        Self { etcd: Etcd::start().await, subject }
    }

    /// The real one first.
    pub(crate) fn addresses(&self) -> [SocketAddr; 2] {
        let subject = match &self.subject {
            Subject::Ours(ours) => ours.address,
            Subject::Etcd(etcd) => etcd.address,
        };
        [self.etcd.address, subject]
    }

    /// Our store, unless an etcd stands in for us.
    pub(crate) fn ours(&self) -> Option<&Ours> {
        match &self.subject {
            Subject::Ours(ours) => Some(ours),
            Subject::Etcd(_) => None,
        }
    }
}
