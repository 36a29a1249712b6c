//! Signing in and out, with a form that needs no script.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use axum::Extension;
use axum::body::{Body, to_bytes};
use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use maud::{DOCTYPE, html as markup};
use serde::Serialize;
use vedetta_access::{Entry, Outcome, Role, Scope, Secret};

use crate::access::{Caller, Ends, Kind, csrf};
use crate::api::Context;
use crate::error::ApiError;
use crate::guard::{FORM, is_form, set_cookie};
use crate::input::{Query, fields};
use crate::json::{Json, stamp};
use crate::page::assets::asset;

/// To wait for one's turn to have a password hashed.
const TURN: Duration = Duration::from_secs(10);
/// Bytes of the longest name that a user can have.
const LONGEST_NAME: usize = 64;

/// What the form has in it.
pub(crate) struct SignIn<'a> {
    /// The hidden field `csrf`.
    pub(crate) csrf: &'a str,
    /// The hidden field `next`: where to go then.
    pub(crate) next: &'a str,
    /// Why it is shown again.
    pub(crate) message: Option<&'a str>,
}

/// The page with the form. It posts `name`, `password`, `csrf` and `next` to `/login`.
pub(crate) fn page(form: &SignIn<'_>) -> String {
    let page = markup! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta name="color-scheme" content="light dark";
                title { "Sign in · Vedetta" }
                link rel="icon" href=(asset("icon.svg")) type="image/svg+xml";
                link rel="stylesheet" href=(asset("page.css"));
            }
            body {
                main.sign-in {
                    h1 { "Vedetta" }
                    @if let Some(message) = form.message { p role="alert" { (message) } }
                    form method="post" action="/login" {
                        input type="hidden" name="csrf" value=(form.csrf);
                        input type="hidden" name="next" value=(form.next);
                        p { label { "Name " input name="name" autocomplete="username" required autofocus; } }
                        p { label { "Password " input name="password" type="password" autocomplete="current-password" required; } }
                        p { button { "Sign in" } }
                    }
                }
            }
        }
    };
    page.into_string()
}

/// A page of our own; anything else is the first one.
fn ours(next: &str) -> &str {
    let is_plain = next.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'\\');
    if next.starts_with('/') && !next.starts_with("//") && is_plain { next } else { "/" }
}

/// Under what a try is counted. What is too long is nobody's name, and is not kept: nobody has signed in.
fn tries(source: &str, name: &str) -> [String; 2] {
    [format!("from {source}"), format!("as {}", &name[..name.floor_char_boundary(LONGEST_NAME)])]
}

fn go(to: &str) -> Response {
    (StatusCode::SEE_OTHER, [(header::LOCATION, to.to_owned())]).into_response()
}

fn html(status: StatusCode, form: &SignIn<'_>) -> Response {
    (status, [(header::CONTENT_TYPE, "text/html; charset=utf-8")], page(form)).into_response()
}

pub(crate) async fn form(
    State(context): State<Context>,
    headers: HeaderMap,
    mut query: Query,
) -> Result<Response, ApiError> {
    let door = &context.door;
    let next = query.text("next")?.unwrap_or_default();
    query.end()?;
    if !door.signs_in {
        return Ok(go("/"));
    }
    // The form is bound to this browser, though nobody has signed in: by an id that becomes worthless when they do.
    if let Some(id) = door.cookie_of(&headers) {
        let form = SignIn { csrf: &csrf(id), next: ours(&next), message: None };
        return Ok(html(StatusCode::OK, &form));
    }
    let id = Secret::random("")?;
    let form = SignIn { csrf: &csrf(id.reveal()), next: ours(&next), message: None };
    let mut response = html(StatusCode::OK, &form);
    set_cookie(&mut response, &door.cookie(id.reveal()));
    Ok(response)
}

pub(crate) async fn sign_in(
    State(context): State<Context>,
    Extension(ends): Extension<Ends>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let door = &context.door;
    let Some(access) = door.access.clone().filter(|_| door.signs_in) else { return Ok(go("/")) };
    if !is_form(&headers) {
        let message = "sign in with a form; programs use a token";
        return Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "not_a_form", message));
    }
    // The guard has it already.
    let body = to_bytes(body, FORM).await;
    let body = body.map_err(|_| ApiError::too_large("a form has 64 KiB at most"))?;
    let (mut name, mut password, mut next) = (String::new(), String::new(), String::new());
    for (field, value) in fields(&body) {
        let value = String::from_utf8(value).unwrap_or_default();
        match field.as_str() {
            "name" => name = value,
            "password" => password = value,
            "next" => next = value,
            _ => {}
        }
    }
    let source = ends.source();
    let old = door.cookie_of(&headers).map(str::to_owned);
    let again = |status, message| {
        let csrf = old.as_deref().map(csrf).unwrap_or_default();
        html(status, &SignIn { csrf: &csrf, next: ours(&next), message: Some(message) })
    };
    let keys = tries(&source, &name);
    let tried = door.throttle.lock().await.attempt(&keys, Instant::now());
    if let Err(wait) = tried {
        let (who, action, target) = ("?".to_owned(), "sign-in too often".into(), String::new());
        door.record(Entry { who, source, action, target, outcome: Outcome::Refused }).await;
        let mut response =
            again(StatusCode::TOO_MANY_REQUESTS, "Too many tries. Wait a minute, and try again.");
        let seconds = HeaderValue::from(wait.as_secs() + 1);
        response.headers_mut().insert(header::RETRY_AFTER, seconds);
        return Ok(response);
    }
    let turn = tokio::time::timeout(TURN, Arc::clone(&door.turns).acquire_owned()).await;
    let Ok(Ok(turn)) = turn else {
        return Err(ApiError::unavailable("too many sign in at once"));
    };
    let (known_as, session) = (name.clone(), old.clone());
    let signing_in = tokio::task::spawn_blocking(move || {
        let _turn = turn;
        access.sign_in(&known_as, &password, session.as_deref(), &source, SystemTime::now())
    });
    let session = signing_in.await.map_err(|_| ApiError::unavailable("signing in broke off"))?;
    let Some(session) = session? else {
        return Ok(again(StatusCode::UNAUTHORIZED, "The name or the password is wrong."));
    };
    door.throttle.lock().await.forgive(&keys);
    let mut response = go(ours(&next));
    set_cookie(&mut response, &door.cookie(session.id.reveal()));
    Ok(response)
}

pub(crate) async fn sign_out(
    State(context): State<Context>,
    Extension(ends): Extension<Ends>,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let door = &context.door;
    let Some(access) = door.access.clone().filter(|_| door.signs_in) else { return Ok(go("/")) };
    if let Some(id) = door.cookie_of(&headers).map(str::to_owned) {
        let source = ends.source();
        let ending =
            tokio::task::spawn_blocking(move || access.sign_out(&id, &source, SystemTime::now()));
        let ended = ending.await.map_err(|_| ApiError::unavailable("signing out broke off"))?;
        ended?;
    }
    let mut response = go("/login");
    set_cookie(&mut response, &format!("{}; Max-Age=0", door.cookie("")));
    Ok(response)
}

/// Who asks, and what their page must send along.
#[derive(Serialize)]
pub(crate) struct Who {
    name: String,
    role: Role,
    scope: Scope,
    /// `local`, `session` or `token`.
    by: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    csrf: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    expires_at: Option<String>,
}

pub(crate) async fn session(caller: Caller, query: Query) -> Result<Json<Who>, ApiError> {
    query.end()?;
    let by = match caller.kind {
        Kind::Local => "local",
        Kind::Session => "session",
        Kind::Token => "token",
    };
    let expires_at = caller.expires.map(stamp);
    let Caller { name, role, scope, csrf, .. } = caller;
    Ok(Json(Who { name, role, scope, by, csrf, expires_at }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn after_signing_in_one_stays_here() {
        for next in ["/", "/jobs?status=dead", "/jobs/7"] {
            assert_eq!(ours(next), next);
        }
        for next in [
            "",
            "//evil.example",
            "https://evil.example",
            "/\\evil.example",
            "/a\r\nSet-Cookie: x",
            "/ä",
        ] {
            assert_eq!(ours(next), "/", "{next}");
        }
    }

    #[test]
    fn what_is_kept_of_a_try_is_short_whatever_the_name() {
        let (long, split) =
            ("x".repeat(60_000), format!("{}{}", "x".repeat(63), "ä".repeat(60_000)));
        for name in ["anna", "", &long, &split] {
            let [_, kept] = tries("::1", name);
            assert!(kept.len() <= 3 + LONGEST_NAME, "{} bytes", kept.len());
            assert!(name.starts_with(&kept[3..]));
        }
        assert_eq!(tries("::1", "anna"), ["from ::1", "as anna"]);
    }

    #[test]
    fn nothing_gets_out_of_the_form() {
        let form = SignIn { csrf: "\"><script>", next: "'><b>", message: Some("<i>&") };
        let page = page(&form);
        assert!(!page.contains("<script>") && !page.contains("<b>") && !page.contains("<i>"));
        assert!(page.contains("&quot;&gt;&lt;script&gt;"));
    }
}
