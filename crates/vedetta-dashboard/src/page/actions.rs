//! What forms do. Each does one thing, and answers with the way back, or with what came of it for a script that
//! asks for JSON.

use axum::body::Bytes;
use axum::extract::{FromRequest, FromRequestParts as _, Path, Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use serde_json::json;
use vedetta_core::JobState;
use vedetta_fleet::Order;
use vedetta_fleet::bus::TTL;
use vedetta_jobs::wire::Which;
use vedetta_jobs::{Mode, status};

use super::{THEME, Tab, Visit, jobs};
use crate::api::Context;
use crate::error::ApiError;
use crate::input::Query;
use crate::jobs::{JobPath, ledger, made, retry_matching};
use crate::json::Json;
use crate::queues::{QueuePath, set_mode};
use crate::workers::{Named, fleet};
use crate::{stages, watchers};

/// Bytes of a form.
const FORM: usize = 64 << 10;
/// Calls that one press of a button makes, of some hundred jobs each.
const ROUNDS: usize = 20;

/// The fields of a form, and who sent it.
pub(super) struct Form {
    fields: Query,
    back: String,
    wants_json: bool,
    visit: Visit,
}

impl FromRequest<Context> for Form {
    type Rejection = ApiError;

    async fn from_request(request: Request, context: &Context) -> Result<Self, ApiError> {
        let kind = text(request.headers(), &header::CONTENT_TYPE);
        let kind = kind.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
        if kind != "application/x-www-form-urlencoded" {
            let message = "a form comes with Content-Type: application/x-www-form-urlencoded";
            return Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "not_a_form", message));
        }
        let wants_json = text(request.headers(), &header::ACCEPT) == "application/json";
        let (mut parts, body) = request.into_parts();
        let Ok(visit) = Visit::from_request_parts(&mut parts, context).await;
        let reading = Bytes::from_request(Request::from_parts(parts, body), context);
        let body = tokio::time::timeout(context.limits.body, reading).await.map_err(|_| {
            ApiError::new(StatusCode::REQUEST_TIMEOUT, "too_slow", "the form took too long")
        })?;
        let body = body.map_err(|_| ApiError::too_large("the form is too large"))?;
        if body.len() > FORM {
            return Err(ApiError::too_large("the form has more than 64 KiB"));
        }
        let mut fields = Query::parse(&String::from_utf8_lossy(&body));
        fields.bytes("csrf");
        let back = fields.text("back")?.filter(|back| is_ours(back)).unwrap_or_else(|| "/".into());
        Ok(Self { fields, back, wants_json, visit })
    }
}

fn text<'a>(headers: &'a HeaderMap, name: &header::HeaderName) -> &'a str {
    headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default()
}

/// Whether it is a place of this server, and nothing but that.
fn is_ours(back: &str) -> bool {
    let is_plain = back.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'\\');
    back.starts_with('/') && !back.starts_with("//") && is_plain
}

/// What was done, for people; in addresses only its word and number stand.
pub(super) fn notice(said: &str) -> Option<String> {
    let (word, number) = match said.split_once('-') {
        Some((word, number)) => (word, Some(number.parse::<u64>().ok()?)),
        None => (said, None),
    };
    let text = match (word, number) {
        ("retried", Some(1)) => "1 job is to be tried again.".to_owned(),
        ("retried", Some(count)) => format!("{count} jobs are to be tried again."),
        ("more", Some(count)) => {
            format!("{count} jobs are to be tried again. There are more: press once more.")
        }
        ("retry", Some(id)) => format!("Job {id} is to be tried again."),
        ("cancelled", Some(id)) => format!("Job {id} was cancelled."),
        ("deleted", Some(id)) => format!("Job {id} was deleted."),
        ("paused", None) => "The queue is paused.".into(),
        ("resumed", None) => "The queue is open.".into(),
        ("draining", None) => "The queue takes nothing new on.".into(),
        ("started", Some(1)) => "1 worker was asked for.".into(),
        ("started", Some(count)) => format!("{count} workers were asked for."),
        ("pause", None) => "The worker is told to pause.".into(),
        ("resume", None) => "The worker is told to go on.".into(),
        ("stop", None) => "The worker is told to finish what it has, and stop.".into(),
        ("restart", None) => "All workers are replaced, one after the other.".into(),
        ("terminate", None) => "All workers are told to finish what they have, and stop.".into(),
        ("record", None) => "The record is to be tried again.".into(),
        ("resynced", Some(count)) => format!("{count} ids are to be run again."),
        _ => return None,
    };
    Some(text)
}

impl Form {
    fn done(self, said: &str) -> Response {
        if self.wants_json {
            let said = notice(said).unwrap_or_default();
            return Json(json!({ "said": said })).into_response();
        }
        let mark = if self.back.contains('?') { '&' } else { '?' };
        let back = format!("{}{mark}said={said}", self.back);
        (StatusCode::SEE_OTHER, [(header::LOCATION, back)]).into_response()
    }

    fn failed(self, error: ApiError) -> Response {
        if self.wants_json {
            return error.into_response();
        }
        self.visit.show(Tab::Jobs, "", Err(error))
    }

    /// Answers with what came of it.
    fn answer(self, done: Result<String, ApiError>) -> Response {
        match done {
            Ok(said) => self.done(&said),
            Err(error) => self.failed(error),
        }
    }
}

type Id = Result<JobPath, ApiError>;

pub(super) async fn retry(State(context): State<Context>, id: Id, form: Form) -> Response {
    let done = async {
        let JobPath(id) = id?;
        let change = ledger(&context)?.retry(id).await?;
        made(id, change, "only a job that is dead or was cancelled can be retried")?;
        Ok(format!("retry-{id}"))
    };
    let done = done.await;
    form.answer(done)
}

pub(super) async fn cancel(State(context): State<Context>, id: Id, form: Form) -> Response {
    let done = async {
        let JobPath(id) = id?;
        let change = ledger(&context)?.cancel(id).await?;
        made(id, change, "only a job that waits or runs can be cancelled")?;
        Ok(format!("cancelled-{id}"))
    };
    let done = done.await;
    form.answer(done)
}

pub(super) async fn delete(State(context): State<Context>, id: Id, form: Form) -> Response {
    let done = async {
        let JobPath(id) = id?;
        made(id, ledger(&context)?.delete(id).await?, "cancel it first")?;
        Ok(format!("deleted-{id}"))
    };
    let done = done.await;
    form.answer(done)
}

pub(super) async fn retry_all(State(context): State<Context>, mut form: Form) -> Response {
    let which = jobs::which(&mut form.fields, &["queue", "kind", "tag", "q"]);
    let done = async {
        let dead = Some(status::word(JobState::Dead).to_owned());
        let mut which = Which { status: dead, ..which? };
        let mut count = 0;
        for _ in 0..ROUNDS {
            let retried = retry_matching(ledger(&context)?, which.clone()).await?;
            count += retried.retried;
            which.cursor = retried.cursor;
            if which.cursor.is_none() {
                return Ok(format!("retried-{count}"));
            }
        }
        Ok(format!("more-{count}"))
    };
    let done = done.await;
    form.answer(done)
}

type Queue = Result<QueuePath, ApiError>;

async fn set(context: &Context, queue: Queue, mode: Mode, said: &str) -> Result<String, ApiError> {
    let QueuePath(name) = queue?;
    set_mode(context, &name, mode).await?;
    Ok(said.to_owned())
}

pub(super) async fn pause(State(context): State<Context>, queue: Queue, form: Form) -> Response {
    let done = set(&context, queue, Mode::Paused, "paused").await;
    form.answer(done)
}

pub(super) async fn resume(State(context): State<Context>, queue: Queue, form: Form) -> Response {
    let done = set(&context, queue, Mode::Open, "resumed").await;
    form.answer(done)
}

pub(super) async fn drain(State(context): State<Context>, queue: Queue, form: Form) -> Response {
    let done = set(&context, queue, Mode::Draining, "draining").await;
    form.answer(done)
}

pub(super) async fn retry_record(
    State(context): State<Context>,
    path: Path<(String, String, String)>,
    form: Form,
) -> Response {
    let done = stages::retry(State(context.clone()), path).await;
    form.answer(done.map(|_| "record".into()))
}

pub(super) async fn resync(
    State(context): State<Context>,
    name: watchers::NamePath,
    form: Form,
) -> Response {
    let done = watchers::resync(State(context.clone()), name).await;
    form.answer(done.map(|Json(resynced)| format!("resynced-{}", resynced.ids)))
}

pub(super) async fn theme(mut form: Form) -> Result<Response, ApiError> {
    let theme = match form.fields.text("theme")?.as_deref() {
        Some("dark") => "dark",
        Some("light") => "light",
        _ => "system",
    };
    let cookie = format!("{THEME}={theme}; Path=/; Max-Age=31536000; SameSite=Strict; HttpOnly");
    let head = [(header::LOCATION, form.back), (header::SET_COOKIE, cookie)];
    Ok((StatusCode::SEE_OTHER, head).into_response())
}

type Worker = Result<Named, ApiError>;

async fn steer(context: &Context, worker: Worker, order: Order) -> Result<String, ApiError> {
    let Named(id) = worker?;
    fleet(context)?.tell(&id, &order, TTL).await?;
    Ok(order.word().to_owned())
}

pub(super) async fn stop_worker(context: State<Context>, worker: Worker, form: Form) -> Response {
    let done = steer(&context, worker, Order::Stop).await;
    form.answer(done)
}

pub(super) async fn pause_worker(context: State<Context>, worker: Worker, form: Form) -> Response {
    let done = steer(&context, worker, Order::Pause).await;
    form.answer(done)
}

pub(super) async fn resume_worker(context: State<Context>, worker: Worker, form: Form) -> Response {
    let done = steer(&context, worker, Order::Resume).await;
    form.answer(done)
}

pub(super) async fn start_workers(State(context): State<Context>, mut form: Form) -> Response {
    let (queue, count) = (form.fields.text("queue"), form.fields.number("count"));
    let done = async {
        let queue = queue?.ok_or_else(|| ApiError::invalid("a queue is to be said"))?;
        let count = u32::try_from(count?.unwrap_or(1)).unwrap_or(u32::MAX);
        fleet(&context)?.start(&queue, count, TTL).await?;
        Ok(format!("started-{count}"))
    };
    let done = done.await;
    form.answer(done)
}

pub(super) async fn restart_workers(State(context): State<Context>, form: Form) -> Response {
    let done = async { Ok(fleet(&context)?.restart(TTL).await?) };
    let done = done.await;
    form.answer(done.map(|_| "restart".into()))
}

pub(super) async fn terminate_workers(State(context): State<Context>, form: Form) -> Response {
    let done = async { Ok(fleet(&context)?.terminate(TTL).await?) };
    let done = done.await;
    form.answer(done.map(|_| "terminate".into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_way_back_stays_on_this_server() {
        for back in ["/", "/jobs?status=dead&q=a%20b", "/jobs/7"] {
            assert!(is_ours(back), "{back}");
        }
        for back in [
            "",
            "jobs",
            "//evil.example",
            "/\\evil.example",
            "https://evil.example/",
            "/a b",
            "/a\r\nX: y",
        ] {
            assert!(!is_ours(back), "{back:?}");
        }
    }

    #[test]
    fn only_known_words_and_numbers_are_said() {
        assert_eq!(notice("retry-7").unwrap(), "Job 7 is to be tried again.");
        for said in ["", "retry", "retry-x", "<b>", "paused-1", "other"] {
            assert_eq!(notice(said), None, "{said}");
        }
    }
}
