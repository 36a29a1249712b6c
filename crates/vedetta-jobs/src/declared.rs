//! A handler without Rust: a command that is run for each job of a kind.
//!
//! ```text
//! payload ──stdin──► command ──stdout──► {"progress": 0.4, "message": "…"}   seen live
//!                       │                {"result": …}                       kept with the job
//!                       └────stderr────► the job's log
//! ```
//!
//! Exit code 0 is success; anything else is a failure, and the job is tried again. When a job is called off
//! or its time is up, the command and all that it started are killed.

use std::sync::Arc;

use vedetta_core::Failure;
use vedetta_runtime::{Command, CommandError, Watch};

use crate::worker::{Manner, Outcome, Work, Worker};

/// What a command says, told of its job.
struct Told<'a>(&'a Work);

impl Watch for Told<'_> {
    #[expect(clippy::cast_possible_truncation, reason = "it is from 0 to 1")]
    fn progress(&self, progress: f64, message: Option<&str>) {
        self.0.progress(progress as f32);
        if let Some(message) = message {
            self.0.message(message);
        }
    }

    fn log(&self, line: &str) {
        self.0.log(line);
    }
}

impl Worker {
    /// The same with a command for a kind of jobs. It is told of the job as `VEDETTA_JOB`, `VEDETTA_KIND`,
    /// `VEDETTA_ATTEMPT` and `VEDETTA_SLOTS`, which is how many slots it has; and as `TRACEPARENT` of its place in
    /// a trace, if it has one.
    #[must_use]
    pub fn command(self, kind: impl Into<String>, command: Command) -> Self {
        self.declare(kind.into(), command, "VEDETTA_JOB")
    }

    /// The same for jobs that are messages of a stream: their numbers there are not those that people find jobs by,
    /// so the command is told them as `VEDETTA_MESSAGE`, and of no `VEDETTA_JOB`.
    #[must_use]
    pub fn message_command(self, kind: impl Into<String>, command: Command) -> Self {
        self.declare(kind.into(), command, "VEDETTA_MESSAGE")
    }

    fn declare(self, kind: String, command: Command, id: &'static str) -> Self {
        self.add(
            kind,
            Manner::KeepsTime,
            Arc::new(move |work: Work| {
                let command = command
                    .clone()
                    .variable(id, work.id().to_string())
                    .variable("VEDETTA_KIND", work.kind())
                    .variable("VEDETTA_ATTEMPT", work.attempt().to_string())
                    .variable("VEDETTA_SLOTS", work.cost().to_string());
                let command = match work.limit() {
                    Some(limit) => command.limit(limit),
                    None => command,
                };
                let command = match work.trace() {
                    Some(trace) => command.variable("TRACEPARENT", trace.to_string()),
                    None => command,
                };
                Box::pin(async move {
                    match command.run_watched(work.json().as_bytes(), &Told(&work)).await {
                        Ok(result) => Ok(Outcome::Done(result)),
                        Err(CommandError::Timeout { limit, .. }) => Err(Failure::Timeout(limit)),
                        Err(error) => Err(Failure::Error(vedetta_core::explain(&error))),
                    }
                })
            }),
        )
    }
}
