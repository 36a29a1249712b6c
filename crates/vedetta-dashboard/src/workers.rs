//! Workers and their supervisors: who is there, what they are to do, and how they stay alive.
//!
//! A worker beats; the answer has the commands that wait for it, each once. Its stream of wake-ups says when
//! to beat at once.

use std::convert::Infallible;
use std::time::Duration;

use axum::body::Body;
use axum::extract::{FromRequestParts, Path, State};
use axum::http::request::Parts;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use bytes::Bytes;
use futures_util::stream;
use tokio::time::sleep;
use vedetta_fleet::bus::TTL;
use vedetta_fleet::wire::{Beat, CommandInfo, Commands, Gone, Heard, Report, Start, Told, Workers};
use vedetta_fleet::{Fleet, FleetError, Order, Target, Wakes};
use vedetta_jobs::check_name;

use crate::api::Context;
use crate::error::ApiError;
use crate::input::{JsonBody, Query};
use crate::json::Json;
use crate::redact;

/// How long a command may be asked to wait, in milliseconds.
const TTLS: std::ops::RangeInclusive<u64> = 100..=86_400_000;

impl From<FleetError> for ApiError {
    fn from(error: FleetError) -> Self {
        let message = vedetta_core::explain(&error);
        match error {
            FleetError::NotFound(_) => Self::not_found(message),
            FleetError::Conflict(_) => Self::conflict(message),
            FleetError::Invalid(_) => Self::invalid(message),
            FleetError::Unavailable(_) => {
                Self::new(StatusCode::SERVICE_UNAVAILABLE, "unavailable", message).hint("try again")
            }
            _ => Self::new(StatusCode::INTERNAL_SERVER_ERROR, "failed", message),
        }
    }
}

pub(crate) fn fleet(context: &Context) -> Result<&Fleet, ApiError> {
    context.fleet.as_ref().ok_or_else(|| ApiError::not_found("this server keeps no workers"))
}

/// The worker, supervisor or command named in a path.
pub(crate) struct Named(pub(crate) String);

impl<S: Send + Sync> FromRequestParts<S> for Named {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let name = Path::<String>::from_request_parts(parts, state).await;
        let Path(name) = name.map_err(|_| ApiError::invalid("a name is text"))?;
        check_name("name", &name)?;
        Ok(Self(name))
    }
}

/// How long a command may wait.
struct Lasts(Duration);

impl Lasts {
    fn of(mut query: Query) -> Result<Self, ApiError> {
        let asked = query.number("ttl_ms")?;
        query.end()?;
        match asked {
            None => Ok(Self(TTL)),
            Some(millis) if TTLS.contains(&millis) => Ok(Self(Duration::from_millis(millis))),
            Some(_) => {
                let (from, to) = (TTLS.start(), TTLS.end());
                Err(ApiError::invalid(format!("ttl_ms is from {from} to {to}")))
            }
        }
    }
}

pub(crate) async fn list(
    State(context): State<Context>,
    query: Query,
) -> Result<Json<Workers>, ApiError> {
    query.end()?;
    Ok(Json(redact::workers(fleet(&context)?.list())))
}

pub(crate) async fn start(
    State(context): State<Context>,
    query: Query,
    JsonBody(Start { queue, count }): JsonBody<Start>,
) -> Result<Json<CommandInfo>, ApiError> {
    let Lasts(ttl) = Lasts::of(query)?;
    Ok(Json(fleet(&context)?.start(&queue, count, ttl).await?))
}

pub(crate) async fn terminate(
    State(context): State<Context>,
    query: Query,
) -> Result<Json<Commands>, ApiError> {
    let Lasts(ttl) = Lasts::of(query)?;
    Ok(Json(Commands { commands: fleet(&context)?.terminate(ttl).await? }))
}

pub(crate) async fn restart(
    State(context): State<Context>,
    query: Query,
) -> Result<Json<Commands>, ApiError> {
    let Lasts(ttl) = Lasts::of(query)?;
    Ok(Json(Commands { commands: fleet(&context)?.restart(ttl).await? }))
}

type Answer = Result<Json<CommandInfo>, ApiError>;

pub(crate) async fn stop(context: State<Context>, worker: Named, query: Query) -> Answer {
    tell(context, worker, query, Order::Stop).await
}

pub(crate) async fn pause(context: State<Context>, worker: Named, query: Query) -> Answer {
    tell(context, worker, query, Order::Pause).await
}

pub(crate) async fn resume(context: State<Context>, worker: Named, query: Query) -> Answer {
    tell(context, worker, query, Order::Resume).await
}

async fn tell(
    State(context): State<Context>,
    Named(id): Named,
    query: Query,
    order: Order,
) -> Answer {
    let Lasts(ttl) = Lasts::of(query)?;
    Ok(Json(fleet(&context)?.tell(&id, &order, ttl).await?))
}

pub(crate) async fn command(
    State(context): State<Context>,
    Named(id): Named,
    query: Query,
) -> Answer {
    query.end()?;
    Ok(Json(fleet(&context)?.command(&id).await?))
}

pub(crate) async fn beat(
    State(context): State<Context>,
    Named(id): Named,
    JsonBody(beat): JsonBody<Beat>,
) -> Result<Json<Heard>, ApiError> {
    Ok(Json(fleet(&context)?.heard(&id, beat, false).await?))
}

pub(crate) async fn leave(
    State(context): State<Context>,
    Named(id): Named,
) -> Result<Json<Gone>, ApiError> {
    let gone = fleet(&context)?.left(&id).await?;
    Ok(Json(Gone { id, gone }))
}

pub(crate) async fn supervise(
    State(context): State<Context>,
    Named(name): Named,
    JsonBody(report): JsonBody<Report>,
) -> Result<Json<Told>, ApiError> {
    Ok(Json(fleet(&context)?.supervised(&name, report).await?))
}

pub(crate) async fn retire(
    State(context): State<Context>,
    Named(id): Named,
) -> Result<Json<Gone>, ApiError> {
    let gone = fleet(&context)?.retired(&id).await?;
    Ok(Json(Gone { id, gone }))
}

/// Says when a command may wait for a worker: a message without anything in it, `command`.
pub(crate) async fn wake(context: State<Context>, Named(id): Named, query: Query) -> Stream {
    wakes(context, &Target::worker(&id), query)
}

/// The same for a supervisor.
pub(crate) async fn wake_supervisor(
    context: State<Context>,
    Named(name): Named,
    query: Query,
) -> Stream {
    wakes(context, &Target::supervisor(&name), query)
}

type Stream = Result<Response, ApiError>;

fn wakes(State(context): State<Context>, target: &Target, query: Query) -> Stream {
    query.end()?;
    // From now on, and not from when the client has read this much.
    let wakes = fleet(&context)?.listen(target)?;
    let bell = Bell { wakes, context };
    let body = Body::from_stream(stream::unfold(bell, Bell::next));
    Ok(([(header::CONTENT_TYPE, "text/event-stream")], body).into_response())
}

struct Bell {
    wakes: Wakes,
    context: Context,
}

impl Bell {
    async fn next(mut self) -> Option<(Result<Bytes, Infallible>, Self)> {
        let message = tokio::select! {
            () = self.context.stop.cancelled() => return None,
            woken = self.wakes.next() => match woken {
                Ok(()) => "event: command\ndata: {}\n\n",
                // It is known no more.
                Err(_) => return None,
            },
            () = sleep(self.context.limits.sign_of_life) => ":\n\n",
        };
        Some((Ok(Bytes::from_static(message.as_bytes())), self))
    }
}
