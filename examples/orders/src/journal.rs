//! Notes what the stages do, a line each, for who wants to see what was repeated.

use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::path::Path;
use std::sync::Arc;

use vedetta::stage::{BoxError, Limits, Stage, Visit};

use crate::order::Order;

/// A file that several processes may write to.
#[derive(Clone)]
pub(crate) struct Journal(Option<Arc<File>>);

impl Journal {
    pub(crate) fn open(path: Option<&Path>) -> std::io::Result<Self> {
        let open = |path: &Path| OpenOptions::new().create(true).append(true).open(path);
        Ok(Self(path.map(open).transpose()?.map(Arc::new)))
    }

    /// A stage whose runs are noted.
    pub(crate) fn of<S>(&self, stage: S) -> Noted<S> {
        Noted { stage, journal: self.clone() }
    }

    fn note(&self, stage: &str, order: &Order, what: &str) -> std::io::Result<()> {
        let Some(mut file) = self.0.as_deref() else { return Ok(()) };
        let Order { id, version, .. } = order;
        let line = format!("{} {stage} {id} {} {what}\n", std::process::id(), version.0);
        file.write_all(line.as_bytes())
    }
}

/// A stage, noted when it begins and when it ends.
pub(crate) struct Noted<S> {
    stage: S,
    journal: Journal,
}

impl<S: Stage<Order>> Stage<Order> for Noted<S> {
    fn name(&self) -> &str {
        self.stage.name()
    }

    fn should_process_now(&self, order: &Order) -> bool {
        self.stage.should_process_now(order)
    }

    async fn process(&self, order: Order) -> Result<Visit<Order>, BoxError> {
        let (name, given) = (self.stage.name(), order.clone());
        self.journal.note(name, &given, "begin")?;
        let visit = self.stage.process(order).await;
        self.journal.note(name, &given, if visit.is_ok() { "end" } else { "failed" })?;
        visit
    }

    fn limits(&self) -> Limits {
        self.stage.limits()
    }
}
