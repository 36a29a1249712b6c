//! kube-rs's Controller, on the same changes.

use std::borrow::Cow;
use std::convert::Infallible;
use std::sync::Arc;

use futures_util::{StreamExt as _, stream};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Resource;
use kube::runtime::controller::{Action, Config, Controller};
use kube::runtime::{WatchStreamExt as _, reflector, watcher};
use serde::Deserialize;
use tokio::task::JoinSet;

use super::{PARALLEL, Running, Seen, Spec};

#[derive(Debug, Clone, Deserialize)]
struct Thing {
    metadata: ObjectMeta,
    spec: Spec,
}

impl Resource for Thing {
    type DynamicType = ();
    type Scope = kube::core::ClusterResourceScope;

    fn kind((): &()) -> Cow<'_, str> {
        "Thing".into()
    }
    fn group((): &()) -> Cow<'_, str> {
        "bench".into()
    }
    fn version((): &()) -> Cow<'_, str> {
        "v1".into()
    }
    fn plural((): &()) -> Cow<'_, str> {
        "things".into()
    }
    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }
    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}

/// The changes as kube's watcher would bring them.
fn changes(
    seen: &Arc<Seen>,
) -> impl stream::Stream<Item = Result<watcher::Event<Thing>, watcher::Error>> + use<> {
    let seen = Arc::clone(seen);
    let first = stream::iter([watcher::Event::Init, watcher::Event::InitDone]);
    let rest = stream::unfold((seen, 0), move |(seen, at)| async move {
        let now = seen.script.next(seen.began, at).await;
        let (end, also) = (now.end, Arc::clone(&seen));
        let events = now.map(move |change| {
            let name = Some(also.script.id(change).to_string());
            let spec = serde_json::from_slice(also.tape.value(change)).expect("the value is JSON");
            let metadata = ObjectMeta { name, ..ObjectMeta::default() };
            watcher::Event::Apply(Thing { metadata, spec })
        });
        Some((stream::iter(events), (seen, end)))
    });
    first.chain(rest.flatten()).map(Ok)
}

pub(super) fn start(seen: &Arc<Seen>) -> Running {
    let (reader, writer) = reflector::store();
    let things = reflector(writer, changes(seen)).applied_objects();
    let config =
        Config::default().concurrency(u16::try_from(PARALLEL.get()).expect("a small number"));
    let controller = Controller::for_stream(things, reader).with_config(config).run(
        |thing: Arc<Thing>, seen: Arc<Seen>| async move {
            seen.handled(thing.spec.change);
            Ok::<_, Infallible>(Action::await_change())
        },
        |_, error, _| match *error {},
        Arc::clone(seen),
    );
    let mut running = JoinSet::new();
    running.spawn(controller.for_each(|_| std::future::ready(())));
    Box::new(running)
}
