//! Who may ask: the check before every request that a browser could have made.
//!
//! There is no sign-in, so the danger is a web page in a browser that reaches us. It comes from another
//! origin (`Sec-Fetch-Site` and `Origin` show it), or under a name of its own that resolves to this machine
//! (`Host` shows it). gRPC needs no check, since no page can speak it; other programs send none of these.

use std::net::IpAddr;

use axum::http::uri::Authority;
use axum::http::{HeaderMap, HeaderName, Request, StatusCode, header};

/// A status, and why.
pub(crate) type Refusal = (StatusCode, &'static str);

/// Refuses what a page of another site asks. `local` is the address the connection came in on.
pub(crate) fn check<B>(request: &Request<B>, local: IpAddr) -> Result<(), Refusal> {
    let headers = request.headers();
    // HTTP/2 has it in the URI.
    let host = match request.uri().authority() {
        Some(authority) => Some(authority.as_str()),
        None => text(headers, &header::HOST),
    };
    if host.is_some_and(|host| !is_known(host, local)) {
        let text = "this server has another name: use its address, or localhost\n";
        return Err((StatusCode::MISDIRECTED_REQUEST, text));
    }
    let site = text(headers, &HeaderName::from_static("sec-fetch-site"));
    let same_site = matches!(site, None | Some("same-origin" | "none"));
    let same_origin = text(headers, &header::ORIGIN).is_none_or(|origin| {
        let authority = origin.split_once("://").map(|(_, authority)| authority);
        authority.zip(host).is_some_and(|(from, host)| from.eq_ignore_ascii_case(host))
    });
    if same_site && same_origin {
        return Ok(());
    }
    Err((StatusCode::FORBIDDEN, "a page of another site may not ask\n"))
}

/// A header as text; one that is not text is no value that we know.
fn text<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a str> {
    headers.get(name).map(|value| value.to_str().unwrap_or("?"))
}

/// Whether the name in `Host` may be ours. An address is nobody's to redirect. Who comes from another
/// machine knows us by a name that we do not; on loopback there is only one.
fn is_known(host: &str, local: IpAddr) -> bool {
    let Ok(authority) = host.parse::<Authority>() else { return false };
    let name = authority.host();
    let bare = name.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(name);
    bare.parse::<IpAddr>().is_ok()
        || bare.eq_ignore_ascii_case("localhost")
        || !local.to_canonical().is_loopback()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(local: &str, headers: &[(&str, &str)]) -> u16 {
        let mut request = Request::post("/v2/keys/a");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let checked = check(&request.body(()).unwrap(), local.parse().unwrap());
        checked.map_or_else(|(status, _)| status.as_u16(), |()| 200)
    }

    #[test]
    fn pages_of_other_sites_are_refused_and_programs_are_not() {
        let ours = ("host", "127.0.0.1:2379");
        for (local, headers, expected) in [
            ("127.0.0.1", &[][..], 200),
            ("127.0.0.1", &[ours], 200),
            ("127.0.0.1", &[("host", "localhost:2379")], 200),
            ("127.0.0.1", &[("host", "[::1]:2379")], 200),
            ("127.0.0.1", &[("host", "evil.example:2379")], 421),
            ("::ffff:127.0.0.1", &[("host", "evil.example:2379")], 421),
            ("127.0.0.1", &[("host", "a@b@c")], 421),
            ("192.0.2.7", &[("host", "etcd.example:2379")], 200),
            ("127.0.0.1", &[ours, ("origin", "http://127.0.0.1:2379")], 200),
            ("127.0.0.1", &[ours, ("origin", "http://127.0.0.1:80")], 403),
            ("127.0.0.1", &[ours, ("origin", "null")], 403),
            ("192.0.2.7", &[("host", "etcd.example"), ("origin", "http://evil.example")], 403),
            ("127.0.0.1", &[ours, ("sec-fetch-site", "cross-site")], 403),
            ("127.0.0.1", &[ours, ("sec-fetch-site", "same-site")], 403),
            ("127.0.0.1", &[ours, ("sec-fetch-site", "none")], 200),
        ] {
            assert_eq!(ask(local, headers), expected, "{local} {headers:?}");
        }
    }
}
