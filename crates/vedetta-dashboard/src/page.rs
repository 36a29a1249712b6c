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
mod assets;
mod failed;
mod insights;
mod jobs;
mod kv;
mod overview;
mod parts;
mod queues;
mod watching;
mod workers;

use axum::Router;
use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use axum::routing::{get, post};
use maud::{DOCTYPE, Markup, html};

use self::assets::asset;
use crate::api::Context;
use crate::error::ApiError;

pub(crate) fn routes() -> Router<Context> {
    Router::new()
        .route("/", get(overview::page))
        .route("/jobs", get(jobs::list))
        .route("/jobs/{id}", get(jobs::show))
        .route("/jobs/{id}/retry", post(actions::retry))
        .route("/jobs/{id}/cancel", post(actions::cancel))
        .route("/jobs/{id}/delete", post(actions::delete))
        .route("/failed", get(failed::page))
        .route("/failed/retry", post(actions::retry_all))
        .route("/queues", get(queues::page))
        .route("/queues/{queue}/pause", post(actions::pause))
        .route("/queues/{queue}/resume", post(actions::resume))
        .route("/queues/{queue}/drain", post(actions::drain))
        .route("/workers", get(workers::page))
        .route("/stages", get(watching::stages))
        .route("/stages/{entity}/{stage}/{id}/retry", post(actions::retry_record))
        .route("/watchers", get(watching::watchers))
        .route("/watchers/{name}/resync", post(actions::resync))
        .route("/kv", get(kv::page))
        .route("/insights", get(insights::page))
        .route("/theme", post(actions::theme))
        .route("/assets/{hash}/{*name}", get(assets::serve))
}

/// What a form proves that it came from a page of ours with.
pub(crate) fn csrf(_context: &Context) -> String {
    String::new()
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
        })
    }
}

impl Visit {
    /// The whole page, or what went wrong.
    fn show(
        &self,
        context: &Context,
        tab: Tab,
        title: &str,
        body: Result<Markup, ApiError>,
    ) -> Response {
        let (status, title, body) = match body {
            Ok(body) => (StatusCode::OK, title, body),
            Err(error) => (error.status(), "That did not work", parts::failure(&error)),
        };
        let page = self.shell(context, tab, title, &body).into_string();
        (status, [(header::CONTENT_TYPE, "text/html; charset=utf-8")], page).into_response()
    }

    fn shell(&self, context: &Context, tab: Tab, title: &str, body: &Markup) -> Markup {
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
                            (parts::hidden(context, &self.here))
                            @for (value, word) in themes {
                                button name="theme" value=(value) aria-pressed=(if value == chosen { "true" } else { "false" }) { (word) }
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
