//! Stages as tests need them.

use std::future::Future;
use std::num::NonZeroU32;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use testing::soon;
use tokio::sync::{mpsc, oneshot};
use vedetta_core::Backoff;
use vedetta_stage::{BoxError, Limits, Stage, Visit};

use super::Order;

type Visited = Result<Visit<Order>, BoxError>;
type Wants = dyn Fn(&Order) -> bool + Send + Sync;
type Does = dyn Fn(Order) -> Pin<Box<dyn Future<Output = Visited> + Send>> + Send + Sync;

/// A stage made of closures. It wants every order, and leaves it as it is, unless told otherwise.
#[derive(Clone)]
pub struct Step {
    name: String,
    wants: Arc<Wants>,
    does: Arc<Does>,
    limits: Limits,
}

impl Step {
    /// Tries again within milliseconds, and so often that nothing is set aside.
    pub fn new(name: &str) -> Self {
        let moment = Duration::from_millis(2);
        let backoff = Backoff { first: moment, most: 10 * moment, jitter: 0.0 };
        let limits = Limits { backoff, tries: NonZeroU32::MAX, ..Limits::default() };
        let does: Arc<Does> = Arc::new(|_| Box::pin(async { Ok(Visit::untouched()) }));
        Self { name: name.to_owned(), wants: Arc::new(|_| true), does, limits }
    }

    /// Wants only such orders.
    pub fn wants(mut self, wants: impl Fn(&Order) -> bool + Send + Sync + 'static) -> Self {
        self.wants = Arc::new(wants);
        self
    }

    /// Wants only orders in this state.
    pub fn when(self, state: &'static str) -> Self {
        self.wants(move |order| order.state == state)
    }

    /// Does this.
    pub fn does<F>(mut self, does: impl Fn(Order) -> F + Send + Sync + 'static) -> Self
    where
        F: Future<Output = Visited> + Send + 'static,
    {
        self.does = Arc::new(move |order| Box::pin(does(order)));
        self
    }

    /// Brings an order into this state, if it is not in it: a run may be repeated.
    pub fn makes(self, state: &'static str) -> Self {
        self.does(move |order| async move {
            let is_done = order.state == state;
            Ok(if is_done { Visit::untouched() } else { Visit::updated(order.is(state)) })
        })
    }

    /// With other limits.
    pub fn limits(mut self, change: impl FnOnce(&mut Limits)) -> Self {
        change(&mut self.limits);
        self
    }

    /// So many at once.
    pub fn parallel(self, parallel: u32) -> Self {
        self.limits(|limits| limits.parallel = NonZeroU32::new(parallel).expect("some"))
    }

    /// Set aside after so many failures.
    pub fn tries(self, tries: u32) -> Self {
        self.limits(|limits| limits.tries = NonZeroU32::new(tries).expect("some"))
    }

    /// Tried again after so long, always.
    pub fn waits(self, wait: Duration) -> Self {
        self.limits(|limits| limits.backoff = Backoff { first: wait, most: wait, jitter: 0.0 })
    }
}

impl Stage<Order> for Step {
    fn name(&self) -> &str {
        &self.name
    }

    fn should_process_now(&self, order: &Order) -> bool {
        (self.wants)(order)
    }

    async fn process(&self, order: Order) -> Visited {
        (self.does)(order).await
    }

    fn limits(&self) -> Limits {
        self.limits
    }
}

/// A run that waits for its test to say how it ends.
pub struct Arrived {
    /// What it was given.
    pub order: Order,
    end: oneshot::Sender<Visited>,
}

impl Arrived {
    /// Ends it like this.
    pub fn ends(self, visit: Visit<Order>) {
        // Nobody waits for a run that was ended from outside.
        let _ = self.end.send(Ok(visit));
    }

    /// It changes nothing.
    pub fn leaves(self) {
        self.ends(Visit::untouched());
    }

    /// It brings the order into this state.
    pub fn makes(self, state: &str) {
        let order = self.order.clone().is(state);
        self.ends(Visit::updated(order));
    }

    /// Waits until the run was ended from outside.
    pub async fn ended_from_outside(mut self) {
        soon("the run is ended", self.end.closed()).await;
    }
}

/// The runs of a stage that are held until told how to end.
pub struct Held(mpsc::UnboundedReceiver<Arrived>);

impl Held {
    /// The next run.
    pub async fn next(&mut self) -> Arrived {
        soon("a run begins", self.0.recv()).await.expect("the stage is worked")
    }

    /// One that has begun and was not looked at.
    pub fn pending(&mut self) -> Option<Arrived> {
        self.0.try_recv().ok()
    }
}

/// Has each run of a stage wait for the test.
pub fn held(step: Step) -> (Step, Held) {
    let (tell, told) = mpsc::unbounded_channel();
    let step = step.does(move |order| {
        let (end, ended) = oneshot::channel();
        let _ = tell.send(Arrived { order, end });
        async move { ended.await.unwrap_or_else(|_| Err("the test let go of it".into())) }
    });
    (step, Held(told))
}
