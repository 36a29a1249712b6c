//! The guard: what every request meets before its handler, and the headers after it.
//!
//! ```text
//!  Host ─► no proxy in front, unless people sign in ─► of our own page or of a program ─► declared?
//!              handler ◄─ CSRF token ◄─ scope ◄─ role ◄─ session or token ◄───────────────────┘
//! ```
//!
//! The danger is a web page in the browser of somebody who may do more than it. It reaches us under a name
//! of its own (the `Host` shows it), from another origin (`Sec-Fetch-Site` and `Origin` show it), and never knows
//! the token that belongs to a session. Programs send none of these and are not held up; a bearer token is
//! nothing that a browser adds by itself, so whoever sends one is a program.
//!
//! A stream outlives the request that opened it, so who listens is asked for again and again: it ends with the
//! right to it.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, BodyDataStream, to_bytes};
use axum::extract::{MatchedPath, Request, State};
use axum::http::uri::Authority;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use bytes::Bytes;
use futures_util::{StreamExt as _, stream};
use tokio::time::{Instant, Interval, MissedTickBehavior, interval_at};
use vedetta_access::{Entry, Outcome, Role, same};

use crate::access::{Caller, Door, Ends, Kind, Needs, Rule, Seat, Table, Within, csrf};
use crate::api::Context;
use crate::error::ApiError;
use crate::input::{encode, fields};
use crate::redact;

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

/// In which scripts send the token; forms send it as the field `csrf`.
pub(crate) const CSRF: HeaderName = HeaderName::from_static("x-vedetta-csrf");
/// Bytes of a form.
pub(crate) const FORM: usize = 64 << 10;

/// What the guard needs.
#[derive(Clone)]
pub(crate) struct Guard {
    pub(crate) context: Context,
    pub(crate) table: Arc<Table>,
}

pub(crate) async fn check(State(guard): State<Guard>, request: Request, next: Next) -> Response {
    let door = Arc::clone(&guard.context.door);
    let ends = request.extensions().get::<Ends>().copied();
    let source = ends.map_or_else(|| "?".to_owned(), |ends| ends.source());
    let about = About::of(&request);
    let proof = proof(request.headers());
    let mut response = match guard.admit(request, ends).await {
        Ok(Admitted { request, rule, caller, notes }) => {
            let response = next.run(request).await;
            let response = match &caller {
                Some(caller) if is_stream(&response) => guard.hold(response, &rule, caller, proof),
                _ => response,
            };
            if let (true, Some(caller)) = (notes, &caller) {
                let ok = response.status().as_u16() < 400;
                let outcome = if ok { Outcome::Done } else { Outcome::Failed };
                let action = format!("{} {}", about.method, rule.path);
                let (who, target) = (caller.name.clone(), about.target.clone());
                door.record(Entry { who, source, action, target, outcome }).await;
            }
            about.with_cookie(&door, &rule, caller.as_ref(), response)
        }
        Err(refused) => {
            let Refused { error, who } = *refused;
            if let Some((who, path)) = who {
                // Whoever is not known cannot fill the log: all that is the same becomes one entry.
                let (who, action, target) = match who {
                    Some(who) => (who, format!("{} {path}", about.method), about.target.clone()),
                    None => ("?".to_owned(), "request".to_owned(), String::new()),
                };
                door.record(Entry { who, source, action, target, outcome: Outcome::Refused }).await;
            }
            about.refusal(&door, error)
        }
    };
    let kept = response.headers().get(header::CACHE_CONTROL).cloned();
    response.headers_mut().extend(HEADERS);
    // Only what has its hash in its address says that it may be.
    if let Some(kept) = kept {
        response.headers_mut().insert(header::CACHE_CONTROL, kept);
    }
    response
}

/// What says who somebody is.
fn proof(headers: &HeaderMap) -> HeaderMap {
    let says = [header::AUTHORIZATION, header::COOKIE];
    let kept = says.iter().flat_map(|name| {
        headers.get_all(name).iter().map(move |value| (name.clone(), value.clone()))
    });
    kept.collect()
}

fn is_stream(response: &Response) -> bool {
    let kind = response.headers().get(header::CONTENT_TYPE);
    kind.is_some_and(|kind| kind.as_bytes().starts_with(b"text/event-stream"))
}

/// A stream on its way to somebody.
struct Held {
    body: BodyDataStream,
    door: Arc<Door>,
    caller: Caller,
    within: Option<Within>,
    proof: HeaderMap,
    again: Interval,
    _seat: Seat,
}

impl Held {
    async fn next(mut self) -> Option<(Result<Bytes, axum::Error>, Self)> {
        loop {
            tokio::select! {
                biased;
                _ = self.again.tick(), if self.door.signs_in => if !self.may_go_on() {
                    return None;
                },
                piece = self.body.next() => return Some((piece?, self)),
            }
        }
    }

    /// Whether who listens is who they were, may do no less, and still may be here. Where that cannot be told they
    /// come back, and hear why.
    fn may_go_on(&self) -> bool {
        let Ok(Some(now)) = self.door.listener(&self.proof) else { return false };
        let is_same = now.name == self.caller.name && now.role >= self.caller.role;
        is_same && now.may_enter(self.within)
    }
}

/// What is left of a request when it is gone.
struct About {
    method: Method,
    target: String,
    cookie: Option<String>,
    /// A browser that wants to show a page.
    wants_page: bool,
}

impl About {
    fn of(request: &Request) -> Self {
        let (method, uri) = (request.method().clone(), request.uri());
        let target = uri.path_and_query().map_or("/", |target| target.as_str());
        // Somebody may have put a token there.
        let target = redact::text(target).unwrap_or_else(|| target.to_owned());
        let headers = request.headers();
        let cookie = text(headers, &header::COOKIE).map(str::to_owned);
        let accepts = text(headers, &header::ACCEPT).is_some_and(|all| all.contains("text/html"));
        let wants_page = method == Method::GET && !uri.path().starts_with("/api/") && accepts;
        Self { method, target, cookie, wants_page }
    }

    /// Where nobody signs in, a page comes with the cookie that its forms need.
    fn with_cookie(
        &self,
        door: &Door,
        rule: &Rule,
        caller: Option<&Caller>,
        mut response: Response,
    ) -> Response {
        let is_local = caller.is_some_and(|caller| caller.kind == Kind::Local);
        let is_page = rule.needs != Needs::Anyone
            && (!rule.path.starts_with("/api/") || rule.path == "/api/v1/session");
        let value = door.anyone.reveal();
        let has = self.cookie.as_ref().is_some_and(|cookie| cookie.contains(value));
        if is_local && is_page && self.method == Method::GET && !has {
            set_cookie(&mut response, &door.cookie(value));
        }
        response
    }

    fn refusal(&self, door: &Door, error: ApiError) -> Response {
        let status = error.status();
        if status == StatusCode::UNAUTHORIZED && self.wants_page && door.signs_in {
            let target = self.target.get(..2048).unwrap_or(&self.target);
            let to = format!("/login?next={}", encode(target.as_bytes()));
            return (StatusCode::SEE_OTHER, [(header::LOCATION, to)]).into_response();
        }
        let mut response = error.into_response();
        if status == StatusCode::UNAUTHORIZED {
            let how = HeaderValue::from_static("Bearer");
            response.headers_mut().insert(header::WWW_AUTHENTICATE, how);
        }
        response
    }
}

pub(crate) fn set_cookie(response: &mut Response, cookie: &str) {
    if let Ok(value) = HeaderValue::from_str(cookie) {
        response.headers_mut().append(header::SET_COOKIE, value);
    }
}

struct Admitted {
    request: Request,
    rule: Rule,
    caller: Option<Caller>,
    /// The audit log tells of it.
    notes: bool,
}

struct Refused {
    error: ApiError,
    /// For the audit log: who, if that is known, and the declared path.
    who: Option<(Option<String>, &'static str)>,
}

impl From<ApiError> for Box<Refused> {
    fn from(error: ApiError) -> Self {
        Self::new(Refused { error, who: None })
    }
}

/// Refused, and the audit log tells of somebody who is not known.
fn stranger(error: ApiError) -> Refused {
    Refused { error, who: Some((None, "")) }
}

fn out_of_scope(caller: &Caller, within: Option<Within>) -> ApiError {
    let missing = match within {
        Some(Within::Area(area)) => area.word(),
        _ => "all",
    };
    let message = format!("this needs the scope {missing}");
    let hint = format!(
        "{} has the scope {}; `vedetta token scope` gives it another",
        caller.name, caller.scope
    );
    ApiError::new(StatusCode::FORBIDDEN, "out_of_scope", message).hint(hint)
}

impl Guard {
    /// The stream, for as long as its listener may have it; refused if they have too many.
    fn hold(&self, response: Response, rule: &Rule, caller: &Caller, proof: HeaderMap) -> Response {
        let Context { door, limits, .. } = &self.context;
        let most = if caller.is_many { limits.shared_streams() } else { limits.streams };
        let Some(seat) = door.streams.seat(&caller.name, most) else {
            let message = format!("{} has {most} streams already", caller.name);
            return ApiError::new(StatusCode::TOO_MANY_REQUESTS, "too_many", message)
                .hint("close some, or raise http.connections, of which these are a part")
                .into_response();
        };
        let every = limits.recheck.max(Duration::from_millis(1));
        let mut again = interval_at(Instant::now() + every, every);
        again.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (parts, body) = response.into_parts();
        let held = Held {
            body: body.into_data_stream(),
            door: Arc::clone(door),
            caller: caller.clone(),
            within: rule.within,
            proof,
            again,
            _seat: seat,
        };
        Response::from_parts(parts, Body::from_stream(stream::unfold(held, Held::next)))
    }

    async fn admit(
        &self,
        mut request: Request,
        ends: Option<Ends>,
    ) -> Result<Admitted, Box<Refused>> {
        let door = &self.context.door;
        let changes = !request.method().is_safe();
        admit_host(request.headers(), door, ends.map(|ends| ends.local)).map_err(stranger)?;
        if !door.signs_in && is_forwarded(request.headers()) {
            let message = "this came through a proxy, for which everybody is local";
            let error = ApiError::forbidden(message)
                .hint("set auth.enabled, and sign in; or go around the proxy");
            return Err(stranger(error).into());
        }
        let path = request.extensions().get::<MatchedPath>().map(|path| path.as_str().to_owned());
        let rule = path.as_deref().and_then(|path| self.table.rule(request.method(), path));
        let needs = rule.map_or(Needs::Viewer, |rule| rule.needs);
        let caller = match needs {
            Needs::Anyone => None,
            _ => door.caller(request.headers())?,
        };
        let by_token = caller.as_ref().is_some_and(|caller| caller.kind == Kind::Token);
        if !by_token {
            admit_site(&request, changes).map_err(stranger)?;
        }
        if needs != Needs::Anyone && caller.is_none() {
            let came = request.headers().contains_key(header::AUTHORIZATION);
            return Err(if came {
                stranger(
                    ApiError::unauthorized("the token is not known, or no longer good")
                        .hint("make one with `vedetta token add`"),
                )
                .into()
            } else {
                // Nothing was tried.
                ApiError::unauthorized("sign in first")
                    .hint(
                        "give a token as `Authorization: Bearer …` (VEDETTA_TOKEN), or use /login",
                    )
                    .into()
            });
        }
        let Some(rule) = rule else {
            let methods = path.as_deref().and_then(|path| self.table.methods(path));
            return Err(match methods {
                Some(methods) => ApiError::wrong_method(methods).into(),
                None => ApiError::no_such_route().into(),
            });
        };
        let more = rule.more.filter(|(name, _)| asks_for(request.uri().query(), name));
        let needs = more.map_or(rule.needs, |(_, needs)| needs);
        if let Some(caller) = caller.as_ref().filter(|caller| !caller.may(needs)) {
            let least = needs.role().map_or("", Role::word);
            let error = ApiError::forbidden(format!("this needs the role {least}"))
                .hint(format!("{} has the role {}", caller.name, caller.role));
            let who = Some((Some(caller.name.clone()), rule.path));
            return Err(Box::new(Refused { error, who }));
        }
        if let Some(caller) = caller.as_ref().filter(|caller| !caller.may_enter(rule.within)) {
            let error = out_of_scope(caller, rule.within);
            let who = Some((Some(caller.name.clone()), rule.path));
            return Err(Box::new(Refused { error, who }));
        }
        if changes && !by_token {
            request = self.check_csrf(request, caller.as_ref()).await?;
        }
        let is_sign_in = matches!(rule.path, "/login" | "/logout");
        let notes = (changes && !rule.is_work && !is_sign_in) || more.is_some();
        if let Some(caller) = &caller {
            request.extensions_mut().insert(caller.clone());
        }
        Ok(Admitted { request, rule, caller, notes })
    }

    /// Whether a browser that changes something knows the token of its session.
    async fn check_csrf(
        &self,
        request: Request,
        caller: Option<&Caller>,
    ) -> Result<Request, Box<Refused>> {
        let door = &self.context.door;
        let headers = request.headers();
        let of_browser =
            [&header::COOKIE, &header::ORIGIN, &HeaderName::from_static("sec-fetch-site")];
        if !door.signs_in && !of_browser.iter().any(|name| headers.contains_key(*name)) {
            return Ok(request);
        }
        let cookie = door
            .cookie_of(headers)
            .filter(|cookie| door.signs_in || same(cookie, door.anyone.reveal()));
        let expected = cookie.map(csrf);
        let in_head = text(headers, &CSRF).map(str::to_owned);
        // A form is read here whichever way its token comes: that bounds it, and the time that it takes.
        let (in_form, request) = self.form_token(request).await?;
        let given = in_head.or(in_form);
        if expected.zip(given).is_some_and(|(expected, given)| same(&expected, &given)) {
            return Ok(request);
        }
        let error = ApiError::forbidden("the CSRF token of this session is missing or wrong")
            .hint("reload the page; scripts send it as X-Vedetta-CSRF, from /api/v1/session");
        let who = caller.map(|caller| caller.name.clone());
        Err(Box::new(Refused { error, who: Some((who, "")) }))
    }

    /// The token in a form, and the request with its body.
    async fn form_token(&self, request: Request) -> Result<(Option<String>, Request), ApiError> {
        if !is_form(request.headers()) {
            return Ok((None, request));
        }
        let (parts, body) = request.into_parts();
        let reading = tokio::time::timeout(self.context.limits.body, to_bytes(body, FORM));
        let Ok(read) = reading.await else { return Err(ApiError::too_slow()) };
        let body = read.map_err(|_| ApiError::too_large("a form has 64 KiB at most"))?;
        let token = fields(&body).into_iter().find(|(name, _)| name == "csrf");
        let token = token.and_then(|(_, token)| String::from_utf8(token).ok());
        Ok((token, Request::from_parts(parts, Body::from(body))))
    }
}

pub(crate) fn is_form(headers: &HeaderMap) -> bool {
    let kind = text(headers, &header::CONTENT_TYPE).unwrap_or_default();
    let essence = kind.split(';').next().unwrap_or_default();
    essence.trim().eq_ignore_ascii_case("application/x-www-form-urlencoded")
}

/// Whether a parameter is there and does not say no, however it is written.
fn asks_for(query: Option<&str>, name: &str) -> bool {
    let all = fields(query.unwrap_or_default().as_bytes());
    all.iter().any(|(given, value)| given == name && value != b"false")
}

fn is_forwarded(headers: &HeaderMap) -> bool {
    headers.keys().any(|name| {
        let name = name.as_str();
        name == "forwarded" || name == "x-real-ip" || name.starts_with("x-forwarded-")
    })
}

fn admit_host(headers: &HeaderMap, door: &Door, local: Option<IpAddr>) -> Result<(), ApiError> {
    let mut hosts = headers.get_all(header::HOST).iter();
    let host = hosts.next().and_then(|host| host.to_str().ok()).unwrap_or_default();
    if hosts.next().is_none() && is_ours(host, door.listening.ip(), local, &door.hosts) {
        return Ok(());
    }
    let message = format!("this is not {host:?}");
    Err(ApiError::new(StatusCode::MISDIRECTED_REQUEST, "misdirected", message)
        .hint("use the address it listens on, or localhost; http.hosts adds names"))
}

fn admit_site(request: &Request, changes: bool) -> Result<(), ApiError> {
    let headers = request.headers();
    if changes || request.uri().path().starts_with("/api/") {
        let site = text(headers, &HeaderName::from_static("sec-fetch-site"));
        if !matches!(site, None | Some("same-origin" | "none")) {
            return Err(ApiError::forbidden("a page of another site may not ask for this"));
        }
    }
    let host = text(headers, &header::HOST).unwrap_or_default();
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

/// Whether `Host` names us: a loopback name, the address we listen on, or a name that we were given. Where
/// we listen on all addresses it is the one that the connection came in on.
fn is_ours(host: &str, listening: IpAddr, local: Option<IpAddr>, names: &[String]) -> bool {
    let Ok(authority) = host.parse::<Authority>() else { return false };
    if host.contains('@') {
        return false;
    }
    let name = authority.host();
    let bare = name.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(name);
    match bare.parse::<IpAddr>() {
        Ok(address) => {
            let is_local = || local.is_some_and(|local| local.to_canonical() == address);
            address.is_loopback()
                || address == listening && !address.is_unspecified()
                || listening.is_unspecified() && is_local()
        }
        Err(_) => {
            let is_it = |name: &String| bare.eq_ignore_ascii_case(name);
            bare.eq_ignore_ascii_case("localhost") || names.iter().any(is_it)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_loopback_names_our_addresses_and_given_names_are_ours() {
        let listening = "192.0.2.7".parse().unwrap();
        let names = ["jobs.example".to_owned()];
        let ours = |host| is_ours(host, listening, None, &names);
        for host in ["localhost", "LOCALHOST:7070", "127.0.0.1:1", "127.0.0.2", "[::1]:7070"] {
            assert!(ours(host), "{host}");
        }
        assert!(ours("192.0.2.7:7070") && ours("Jobs.Example:443"));
        for host in [
            "",
            "evil.example",
            "localhost.evil.example",
            "jobs.example.evil.example",
            "x.jobs.example",
            "192.0.2.8",
            "a@b@c",
            "evil@localhost",
            "[::2]",
            "0.0.0.0",
        ] {
            assert!(!ours(host), "{host}");
        }
        let (all, local) = ("0.0.0.0".parse().unwrap(), Some("192.0.2.9".parse().unwrap()));
        assert!(is_ours("192.0.2.9:7070", all, local, &[]));
        assert!(!is_ours("192.0.2.8:7070", all, local, &[]));
        assert!(!is_ours("0.0.0.0:7070", all, local, &[]));
    }

    #[test]
    fn a_parameter_is_found_however_it_is_written() {
        for query in ["reveal=true", "a=1&reveal", "r%65veal=tr%75e", "reveal=1&reveal=false"] {
            assert!(asks_for(Some(query), "reveal"), "{query}");
        }
        for query in ["", "reveal=false", "reveals=true", "x=reveal"] {
            assert!(!asks_for(Some(query), "reveal"), "{query}");
        }
    }
}
