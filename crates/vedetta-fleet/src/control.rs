//! What workers and supervisors say and hear: in one process, or over HTTP to a server.

use std::error::Error;
use std::sync::Arc;

use async_trait::async_trait;
use http::Method;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde::Serialize;
use vedetta_jobs::JobsError;
use vedetta_jobs::remote::RemoteJobs;

use crate::bus::{Order, TTL, Target};
use crate::desk::{Fleet, FleetError};
use crate::wire::{Beat, CommandInfo, Gone, Heard, Report, Told};

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ControlError {
    /// Try again.
    #[error("the server cannot be reached")]
    Unavailable(#[source] Box<dyn Error + Send + Sync>),
    /// There is no point in trying again.
    #[error("the server refused: {0}")]
    Refused(String),
}

/// The side of the server, for workers and supervisors.
#[async_trait]
pub trait Control: Send + Sync + 'static {
    /// A worker's sign of life; it registers with the first. What it is to do.
    async fn beat(&self, worker: &str, beat: &Beat) -> Result<Heard, ControlError>;

    /// A worker is gone, in good order.
    async fn leave(&self, worker: &str) -> Result<(), ControlError>;

    /// Tells, as soon as it listens and then whenever there may be a command for a worker or a supervisor,
    /// until the line breaks.
    async fn listen(
        &self,
        target: &Target,
        tell: &(dyn Fn() + Send + Sync),
    ) -> Result<(), ControlError>;

    /// A supervisor's sign of life. What it is to do, and what is known of its workers.
    async fn supervise(&self, name: &str, report: &Report) -> Result<Told, ControlError>;

    /// A supervisor is gone, in good order.
    async fn retire(&self, name: &str) -> Result<(), ControlError>;

    /// Gives a worker a command.
    async fn tell(&self, worker: &str, order: Order) -> Result<(), ControlError>;
}

impl From<FleetError> for ControlError {
    fn from(error: FleetError) -> Self {
        match error {
            FleetError::Unavailable(source) => Self::Unavailable(source),
            refused => Self::Refused(refused.to_string()),
        }
    }
}

#[async_trait]
impl Control for Fleet {
    async fn beat(&self, worker: &str, beat: &Beat) -> Result<Heard, ControlError> {
        Ok(self.heard(worker, beat.clone(), true).await?)
    }

    async fn leave(&self, worker: &str) -> Result<(), ControlError> {
        self.left(worker).await?;
        Ok(())
    }

    async fn listen(
        &self,
        target: &Target,
        tell: &(dyn Fn() + Send + Sync),
    ) -> Result<(), ControlError> {
        let mut wakes = Self::listen(self, target)?;
        loop {
            tell();
            wakes.next().await?;
        }
    }

    async fn supervise(&self, name: &str, report: &Report) -> Result<Told, ControlError> {
        Ok(self.supervised(name, report.clone()).await?)
    }

    async fn retire(&self, name: &str) -> Result<(), ControlError> {
        self.retired(name).await?;
        Ok(())
    }

    async fn tell(&self, worker: &str, order: Order) -> Result<(), ControlError> {
        Fleet::tell(self, worker, &order, TTL).await?;
        Ok(())
    }
}

/// The fleet of a running Vedetta, over HTTP.
#[derive(Debug, Clone)]
pub struct RemoteFleet(Arc<RemoteJobs>);

impl RemoteFleet {
    /// At the server that these jobs are of.
    pub fn new(server: Arc<RemoteJobs>) -> Self {
        Self(server)
    }
}

impl From<JobsError> for ControlError {
    fn from(error: JobsError) -> Self {
        match error {
            JobsError::Unavailable(source) => Self::Unavailable(source),
            refused => Self::Refused(vedetta_core::explain(&refused)),
        }
    }
}

fn json(value: &impl Serialize) -> Result<Vec<u8>, ControlError> {
    serde_json::to_vec(value).map_err(|error| ControlError::Refused(error.to_string()))
}

fn worker(id: &str) -> String {
    format!("/api/v1/workers/{}", utf8_percent_encode(id, NON_ALPHANUMERIC))
}

fn supervisor(name: &str) -> String {
    format!("/api/v1/supervisors/{}", utf8_percent_encode(name, NON_ALPHANUMERIC))
}

#[async_trait]
impl Control for RemoteFleet {
    async fn beat(&self, id: &str, beat: &Beat) -> Result<Heard, ControlError> {
        let path = format!("{}/beat", worker(id));
        Ok(self.0.call(Method::POST, &path, json(beat)?).await?)
    }

    async fn leave(&self, id: &str) -> Result<(), ControlError> {
        self.0.call::<Gone>(Method::DELETE, &worker(id), Vec::new()).await?;
        Ok(())
    }

    async fn listen(
        &self,
        target: &Target,
        tell: &(dyn Fn() + Send + Sync),
    ) -> Result<(), ControlError> {
        let path = match target.key().split_once(':') {
            Some(("worker", id)) => format!("{}/wake", worker(id)),
            Some((_, name)) => format!("{}/wake", supervisor(name)),
            None => return Err(ControlError::Refused("there is no such target".into())),
        };
        Ok(self.0.stream(&path, |_| tell()).await?)
    }

    async fn supervise(&self, name: &str, report: &Report) -> Result<Told, ControlError> {
        let path = format!("{}/beat", supervisor(name));
        Ok(self.0.call(Method::POST, &path, json(report)?).await?)
    }

    async fn retire(&self, name: &str) -> Result<(), ControlError> {
        self.0.call::<Gone>(Method::DELETE, &supervisor(name), Vec::new()).await?;
        Ok(())
    }

    async fn tell(&self, id: &str, order: Order) -> Result<(), ControlError> {
        let path = format!("{}/{}", worker(id), order.word());
        self.0.call::<CommandInfo>(Method::POST, &path, Vec::new()).await?;
        Ok(())
    }
}
