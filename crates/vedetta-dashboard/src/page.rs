//! The page, built into the program.

use axum::http::header::CONTENT_TYPE;

use crate::access::Needs;
use crate::api::{Route, get};

const FILES: [(Needs, &str, &str, &str); 4] = [
    (Needs::Viewer, "/", "text/html; charset=utf-8", include_str!("../assets/page.html")),
    (
        Needs::Anyone,
        "/assets/page.css",
        "text/css; charset=utf-8",
        include_str!("../assets/page.css"),
    ),
    (
        Needs::Anyone,
        "/assets/page.js",
        "text/javascript; charset=utf-8",
        include_str!("../assets/page.js"),
    ),
    (Needs::Anyone, "/assets/icon.svg", "image/svg+xml", include_str!("../assets/icon.svg")),
];

pub(crate) fn routes() -> Vec<Route> {
    let each = FILES.into_iter().map(|(needs, path, kind, text)| {
        get(needs, path, async move || ([(CONTENT_TYPE, kind)], text))
    });
    each.collect()
}
