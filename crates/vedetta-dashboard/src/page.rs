//! The page, built into the program.

use axum::Router;
use axum::http::header::CONTENT_TYPE;
use axum::routing::get;

use crate::api::Context;

const FILES: [(&str, &str, &str); 4] = [
    ("/", "text/html; charset=utf-8", include_str!("../assets/page.html")),
    ("/assets/page.css", "text/css; charset=utf-8", include_str!("../assets/page.css")),
    ("/assets/page.js", "text/javascript; charset=utf-8", include_str!("../assets/page.js")),
    ("/assets/icon.svg", "image/svg+xml", include_str!("../assets/icon.svg")),
];

pub(crate) fn routes() -> Router<Context> {
    FILES.into_iter().fold(Router::new(), |router, (path, kind, text)| {
        router.route(path, get(async move || ([(CONTENT_TYPE, kind)], text)))
    })
}
