//! Who may ask: the checks before every request and the headers after it.
//!
//! There is no sign-in yet, so the port is on loopback, and the danger is a web page in the browser of the
//! same machine. It reaches us under a name of its own (the `Host` shows it), or from another origin
//! (`Sec-Fetch-Site` and `Origin` show it). Programs send neither of the two and are not held up.

use std::net::IpAddr;

use axum::extract::{Request, State};
use axum::http::uri::Authority;
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};

use crate::api::Context;
use crate::error::ApiError;

const HEADERS: [(HeaderName, HeaderValue); 8] = [
    (
        header::CONTENT_SECURITY_POLICY,
        HeaderValue::from_static(
            "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; \
             connect-src 'self'; worker-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; \
             require-trusted-types-for 'script'; trusted-types vedetta",
        ),
    ),
    (header::X_FRAME_OPTIONS, HeaderValue::from_static("DENY")),
    (header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
    (header::REFERRER_POLICY, HeaderValue::from_static("same-origin")),
    (
        HeaderName::from_static("cross-origin-opener-policy"),
        HeaderValue::from_static("same-origin"),
    ),
    (
        HeaderName::from_static("cross-origin-resource-policy"),
        HeaderValue::from_static("same-origin"),
    ),
    (
        HeaderName::from_static("permissions-policy"),
        HeaderValue::from_static(
            "camera=(), display-capture=(), geolocation=(), microphone=(), payment=(), usb=()",
        ),
    ),
    (header::CACHE_CONTROL, HeaderValue::from_static("no-store")),
];

pub(crate) async fn check(
    State(context): State<Context>,
    request: Request,
    next: Next,
) -> Response {
    let mut response = match admit(&request, context.listening) {
        Ok(()) => next.run(request).await,
        Err(refused) => refused.into_response(),
    };
    let kept = response.headers().get(header::CACHE_CONTROL).cloned();
    response.headers_mut().extend(HEADERS);
    // Only what has its hash in its address says that it may be.
    if let Some(kept) = kept {
        response.headers_mut().insert(header::CACHE_CONTROL, kept);
    }
    response
}

fn admit(request: &Request, listening: IpAddr) -> Result<(), ApiError> {
    let headers = request.headers();
    let host = text(headers, &header::HOST).unwrap_or_default();
    if !is_ours(host, listening) {
        let message = format!("this is not {host:?}");
        return Err(ApiError::new(StatusCode::MISDIRECTED_REQUEST, "misdirected", message)
            .hint("use the address it listens on, or localhost"));
    }
    let changes = !request.method().is_safe();
    if changes || request.uri().path().starts_with("/api/") {
        let site = text(headers, &HeaderName::from_static("sec-fetch-site"));
        if !matches!(site, None | Some("same-origin" | "none")) {
            return Err(ApiError::forbidden("a page of another site may not ask for this"));
        }
    }
    if changes
        && let Some(origin) = text(headers, &header::ORIGIN)
        && !origin
            .split_once("://")
            .is_some_and(|(_, authority)| authority.eq_ignore_ascii_case(host))
    {
        return Err(ApiError::forbidden("a page of another origin may not change anything"));
    }
    Ok(())
}

/// A header as text; one that is not text is no value that we know.
fn text<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a str> {
    headers.get(name).map(|value| value.to_str().unwrap_or("?"))
}

/// Whether `Host` names us: a loopback name, or the address we listen on.
fn is_ours(host: &str, listening: IpAddr) -> bool {
    let Ok(authority) = host.parse::<Authority>() else { return false };
    let name = authority.host();
    let bare = name.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(name);
    match bare.parse::<IpAddr>() {
        Ok(address) => address.is_loopback() || address == listening,
        Err(_) => bare.eq_ignore_ascii_case("localhost"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_loopback_names_and_the_listening_address_are_ours() {
        let listening = "192.0.2.7".parse().unwrap();
        for host in ["localhost", "LOCALHOST:7070", "127.0.0.1:1", "127.0.0.2", "[::1]:7070"] {
            assert!(is_ours(host, listening), "{host}");
        }
        assert!(is_ours("192.0.2.7:7070", listening));
        for host in
            ["", "evil.example", "localhost.evil.example", "192.0.2.8", "a@b@c", "[::2]", "0.0.0.0"]
        {
            assert!(!is_ours(host, listening), "{host}");
        }
    }
}
