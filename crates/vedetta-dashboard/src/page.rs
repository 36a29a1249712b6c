//! The pages: rendered here, readable and usable without a script; scripts keep them live.
//!
//! ```text
//!  GET  /jobs …            a page; all that it shows is in its address
//!  POST /jobs/7/retry …    a form; does it, and goes back to where it was
//!  GET  /assets/HASH/…     styles and scripts, cached for good
//! ```
//!
//! All text is escaped as it is written, and there is no script or style in a page.

mod actions;
pub(crate) mod assets;
mod failed;
mod insights;
mod jobs;
mod kv;
mod overview;
mod parts;
mod queues;
mod watching;
mod workers;

use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use maud::{DOCTYPE, Markup, html};

use self::assets::asset;
use crate::access::Needs::{Anyone, Operator, Viewer};
use crate::access::{Caller, Kind};
use crate::api::{Route, get, more, post};
use crate::error::ApiError;

pub(crate) fn routes() -> Vec<Route> {
    vec![
        get(Viewer, "/", overview::page),
        get(Viewer, "/jobs", jobs::list),
        more("reveal", Operator, get(Viewer, "/jobs/{id}", jobs::show)),
        post(Operator, "/jobs/{id}/retry", actions::retry),
        post(Operator, "/jobs/{id}/cancel", actions::cancel),
        post(Operator, "/jobs/{id}/delete", actions::delete),
        get(Viewer, "/failed", failed::page),
        post(Operator, "/failed/retry", actions::retry_all),
        get(Viewer, "/queues", queues::page),
        post(Operator, "/queues/{queue}/pause", actions::pause),
        post(Operator, "/queues/{queue}/resume", actions::resume),
        post(Operator, "/queues/{queue}/drain", actions::drain),
        get(Viewer, "/workers", workers::page),
        post(Operator, "/workers/start", actions::start_workers),
        post(Operator, "/workers/restart", actions::restart_workers),
        post(Operator, "/workers/terminate", actions::terminate_workers),
        post(Operator, "/workers/{id}/stop", actions::stop_worker),
        post(Operator, "/workers/{id}/pause", actions::pause_worker),
        post(Operator, "/workers/{id}/resume", actions::resume_worker),
        get(Viewer, "/stages", watching::stages),
        post(Operator, "/stages/{entity}/{stage}/{id}/retry", actions::retry_record),
        get(Viewer, "/watchers", watching::watchers),
        post(Operator, "/watchers/{name}/resync", actions::resync),
        get(Viewer, "/kv", kv::page),
        get(Viewer, "/insights", insights::page),
        post(Viewer, "/theme", actions::theme),
        get(Anyone, "/assets/{hash}/{*name}", assets::serve),
    ]
}

/// The pages that the navigation leads to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Tab {
    Overview,
    Jobs,
    Failed,
    Queues,
    Workers,
    Stages,
    Watchers,
    Kv,
    Insights,
}

impl Tab {
    const ALL: [(Self, &'static str, &'static str); 9] = [
        (Self::Overview, "/", "Overview"),
        (Self::Jobs, "/jobs", "Jobs"),
        (Self::Failed, "/failed", "Failed"),
        (Self::Queues, "/queues", "Queues"),
        (Self::Workers, "/workers", "Workers"),
        (Self::Stages, "/stages", "Stages"),
        (Self::Watchers, "/watchers", "Watchers"),
        (Self::Kv, "/kv", "Store"),
        (Self::Insights, "/insights", "Insights"),
    ];

    /// What scripts know the page by.
    fn word(self) -> &'static str {
        let found = Self::ALL.iter().find(|(tab, ..)| *tab == self);
        match found {
            Some((_, "/", _)) | None => "overview",
            Some((_, path, _)) => &path[1..],
        }
    }
}

/// Who looks at a page, and from where.
struct Visit {
    /// `dark` or `light`; nothing: as the system is.
    theme: Option<&'static str>,
    /// The path and query of the page.
    here: String,
    /// What was just done.
    notice: Option<String>,
    /// What a form proves with that it came from a page of ours.
    csrf: String,
    /// Who has signed in, where people do.
    name: Option<String>,
    /// They may see what is hidden, if they ask.
    may_reveal: bool,
}

/// The name of the cookie that keeps the theme.
const THEME: &str = "vedetta-theme";

impl<S: Send + Sync> FromRequestParts<S> for Visit {
    type Rejection = std::convert::Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Self::Rejection> {
        let cookies = parts.headers.get_all(header::COOKIE).iter();
        let mut cookies =
            cookies.filter_map(|value| value.to_str().ok()).flat_map(|all| all.split(';'));
        let theme = cookies.find_map(|one| one.trim().strip_prefix(THEME)?.strip_prefix('='));
        let query = parts.uri.query().unwrap_or_default();
        let said = query.split('&').find_map(|pair| pair.strip_prefix("said="));
        let rest: Vec<&str> = query
            .split('&')
            .filter(|pair| !pair.is_empty() && !pair.starts_with("said="))
            .collect();
        let caller = parts.extensions.get::<Caller>();
        let path = parts.uri.path();
        let here =
            if rest.is_empty() { path.to_owned() } else { format!("{path}?{}", rest.join("&")) };
        Ok(Self {
            theme: match theme {
                Some("dark") => Some("dark"),
                Some("light") => Some("light"),
                _ => None,
            },
            here,
            notice: said.and_then(actions::notice),
            may_reveal: caller.is_some_and(|caller| caller.may(Operator)),
            csrf: caller.and_then(|caller| caller.csrf.clone()).unwrap_or_default(),
            name: caller
                .filter(|caller| caller.kind == Kind::Session)
                .map(|caller| caller.name.clone()),
        })
    }
}

impl Visit {
    /// The whole page, or what went wrong.
    fn show(&self, tab: Tab, title: &str, body: Result<Markup, ApiError>) -> Response {
        let (status, title, body) = match body {
            Ok(body) => (StatusCode::OK, title, body),
            Err(error) => (error.status(), "That did not work", parts::failure(&error)),
        };
        let page = self.shell(tab, title, &body).into_string();
        (status, [(header::CONTENT_TYPE, "text/html; charset=utf-8")], page).into_response()
    }

    fn shell(&self, tab: Tab, title: &str, body: &Markup) -> Markup {
        let themes = [("system", "System"), ("light", "Light"), ("dark", "Dark")];
        let chosen = self.theme.unwrap_or("system");
        let kept = if self.notice.is_some() { "notice" } else { "" };
        html! {
            (DOCTYPE)
            html lang="en" data-theme=[self.theme] data-page=(tab.word()) data-stream=(asset("stream.js")) {
                head {
                    meta charset="utf-8";
                    meta name="viewport" content="width=device-width, initial-scale=1";
                    meta name="color-scheme" content=(self.theme.unwrap_or("light dark"));
                    title { (title) " · Vedetta" }
                    link rel="icon" href=(asset("icon.svg")) type="image/svg+xml";
                    link rel="stylesheet" href=(asset("vendor/uPlot.min.css"));
                    link rel="stylesheet" href=(asset("page.css"));
                    script src=(asset("page.js")) type="module" {}
                }
                body {
                    a.skip href="#main" { "Skip to the content" }
                    header.top {
                        a.brand href="/" {
                            img src=(asset("icon.svg")) alt="" width="28" height="28";
                            "Vedetta"
                        }
                        p #line role="status" data-state="waiting" hidden { "connecting" }
                        button #pause type="button" aria-pressed="false" hidden { "Pause live" }
                        form.theme method="post" action="/theme" {
                            (parts::hidden(self, &self.here))
                            @for (value, word) in themes {
                                button name="theme" value=(value) aria-pressed=(if value == chosen { "true" } else { "false" }) { (word) }
                            }
                        }
                        @if let Some(name) = &self.name {
                            form.sign-out method="post" action="/logout" {
                                (parts::hidden(self, "/"))
                                button { "Sign out " (name) }
                            }
                        }
                    }
                    nav aria-label="Pages" {
                        ul {
                            @for (each, path, word) in Tab::ALL {
                                li {
                                    a href=(path) aria-current=[(each == tab).then_some("page")] { (word) }
                                }
                            }
                        }
                    }
                    main #main tabindex="-1" {
                        h1 { (title) }
                        p #outcome .outcome.(kept) role="status" aria-live="polite" { (self.notice.as_deref().unwrap_or_default()) }
                        (body)
                    }
                }
            }
        }
    }
}
