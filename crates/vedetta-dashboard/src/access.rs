//! Who may do what, in one place: each route says what it needs, and the guard asks here.
//!
//! A route that is not in the table is not there: what nobody declared, nobody reaches.

use std::collections::HashMap;
use std::collections::hash_map::Entry as Place;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use axum::http::{HeaderMap, Method, header};
use base64::Engine as _;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use sha2::{Digest as _, Sha256};
use tokio::sync::{Mutex, Semaphore, mpsc};
use vedetta_access::{
    Access, AccessError, Area, Entry, Identity, Proof, Role, Scope, Secret, Throttle,
};

use crate::api::Route;
use crate::error::ApiError;

/// Who may use a route.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Needs {
    /// Whoever reaches the port.
    Anyone,
    /// Those who may look.
    Viewer,
    /// Those who may run things.
    Operator,
    /// Those who may change everything.
    Admin,
}

impl Needs {
    /// The role; none is needed where anyone may.
    pub(crate) fn role(self) -> Option<Role> {
        match self {
            Self::Anyone => None,
            Self::Viewer => Some(Role::Viewer),
            Self::Operator => Some(Role::Operator),
            Self::Admin => Some(Role::Admin),
        }
    }
}

/// Whose a route is among tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Within {
    /// Those whose scope has the area.
    Area(Area),
    /// Every one: it tells who asks and what there is, and nothing of what is kept here.
    Every,
}

/// Whose it is, by its declared path; nothing for a path that nobody thought of, and that a token with a scope is
/// refused. A page is where its subject is.
pub(crate) fn within(path: &str) -> Option<Within> {
    let path = path.strip_prefix("/api/v1").unwrap_or(path);
    let mut parts = path.trim_start_matches('/').split('/');
    let area = match (parts.next()?, parts.nth(1)) {
        // What takes jobs gets all that is in them.
        ("queues", Some("take" | "wake")) | ("jobs" | "failed", _) => Area::Jobs,
        ("queues", _) => Area::Queues,
        ("workers" | "supervisors" | "commands", _) => Area::Workers,
        ("stages", _) => Area::Stages,
        ("watchers", _) => Area::Watchers,
        ("kv" | "leases" | "watch" | "compact", _) => Area::Kv,
        ("overview" | "stats" | "insights" | "metrics", _) => Area::Stats,
        // The first page has jobs and queues and keys, and so has the stream.
        ("events" | "", _) => Area::Events,
        ("audit", _) => Area::Audit,
        ("session" | "openapi.json" | "theme" | "logout", _) => return Some(Within::Every),
        _ => return None,
    };
    Some(Within::Area(area))
}

/// What is declared of a route.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rule {
    pub(crate) path: &'static str,
    pub(crate) needs: Needs,
    pub(crate) within: Option<Within>,
    /// A parameter of the query that needs more, and that the audit log tells of.
    pub(crate) more: Option<(&'static str, Needs)>,
    /// What programs do all day, and the audit log does not tell.
    pub(crate) is_work: bool,
}

/// What is declared, by path and method.
#[derive(Debug, Default)]
pub(crate) struct Table(HashMap<&'static str, Vec<(Method, Rule)>>);

impl Table {
    pub(crate) fn of<'a>(routes: impl IntoIterator<Item = &'a Route>) -> Self {
        let mut table = Self::default();
        for route in routes {
            let rule = Rule {
                path: route.path,
                needs: route.needs,
                within: within(route.path),
                more: route.more,
                is_work: route.is_work,
            };
            let method = route.method.parse().unwrap_or(Method::GET);
            table.0.entry(route.path).or_default().push((method, rule));
        }
        table
    }

    pub(crate) fn rule(&self, method: &Method, path: &str) -> Option<Rule> {
        // Whoever may have it may ask what its head would be.
        let method = if method == Method::HEAD { &Method::GET } else { method };
        let rules = self.0.get(path)?;
        rules.iter().find(|(of, _)| of == method).map(|(_, rule)| *rule)
    }

    /// What may be done at a path, as `Allow` says it.
    pub(crate) fn methods(&self, path: &str) -> Option<String> {
        let mut methods: Vec<&str> =
            self.0.get(path)?.iter().map(|(method, _)| method.as_str()).collect();
        if methods.contains(&"GET") {
            methods.push("HEAD");
        }
        Some(methods.join(","))
    }
}

/// Who asks; handlers may have it as an argument.
#[derive(Debug, Clone)]
pub(crate) struct Caller {
    /// A user, `token:NAME`, or `local` where nobody signs in.
    pub(crate) name: String,
    pub(crate) role: Role,
    /// Where; all of it for everybody but some tokens.
    pub(crate) scope: Scope,
    pub(crate) kind: Kind,
    /// Stands for many: whoever reaches the port, or all that the server started.
    pub(crate) is_many: bool,
    /// What forms and scripts of the page must send along with what changes anything; tokens need none.
    pub(crate) csrf: Option<String>,
    pub(crate) expires: Option<SystemTime>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Nobody signs in here.
    Local,
    Session,
    Token,
}

impl Caller {
    pub(crate) fn may(&self, needs: Needs) -> bool {
        needs.role().is_none_or(|role| self.role >= role)
    }

    /// Whether a route is where they may be at all.
    pub(crate) fn may_enter(&self, within: Option<Within>) -> bool {
        match within {
            Some(Within::Every) => true,
            Some(Within::Area(area)) => self.scope.has(area),
            None => self.scope == Scope::All,
        }
    }

    fn new(identity: Identity, csrf: Option<String>) -> Self {
        let (kind, name) = match identity.proof {
            Proof::Session => (Kind::Session, identity.name.clone()),
            Proof::Token | Proof::Lent => (Kind::Token, format!("token:{}", identity.name)),
        };
        let is_many = identity.proof == Proof::Lent;
        let Identity { role, scope, expires, .. } = identity;
        Self { name, role, scope, kind, is_many, csrf, expires }
    }
}

impl<S: Sync> FromRequestParts<S> for Caller {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ApiError> {
        // The guard put it there, before every handler but those for anyone.
        let caller = parts.extensions.get::<Self>().cloned();
        caller.ok_or_else(|| ApiError::unauthorized("nobody has signed in"))
    }
}

/// The two ends of a connection.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ends {
    pub(crate) peer: SocketAddr,
    pub(crate) local: IpAddr,
}

impl Ends {
    /// Where it comes from, as the audit log and the throttle know it: of IPv6 the network.
    pub(crate) fn source(&self) -> String {
        match self.peer.ip().to_canonical() {
            IpAddr::V6(address) if !address.is_loopback() => {
                let [a, b, c, d, ..] = address.segments();
                format!("{a:x}:{b:x}:{c:x}:{d:x}::/64")
            }
            address => address.to_string(),
        }
    }
}

/// Tries to sign in within a minute, of each address and for each name.
const TRIES: usize = 5;
const WINDOW: Duration = Duration::from_secs(60);
/// Passwords that are hashed at once, at 19 MiB each.
const AT_ONCE: usize = 2;
/// Entries that wait to be written; then requests wait for that.
pub(crate) const ENTRIES: usize = 1024;

/// How a server is entered.
#[derive(Debug)]
pub(crate) struct Door {
    pub(crate) access: Option<Access>,
    /// Everything needs a session or a token. If not, whoever reaches the port may do everything.
    pub(crate) signs_in: bool,
    /// Names in `Host` beside our address and those of loopback.
    pub(crate) hosts: Vec<String>,
    pub(crate) listening: SocketAddr,
    pub(crate) is_tls: bool,
    /// In place of a session where nobody signs in.
    pub(crate) anyone: Secret,
    pub(crate) throttle: Mutex<Throttle>,
    pub(crate) turns: Arc<Semaphore>,
    pub(crate) audit: mpsc::Sender<Entry>,
    pub(crate) streams: Arc<Streams>,
}

/// How many streams each caller has, and whether it was logged that they are too many.
#[derive(Debug, Default)]
pub(crate) struct Streams(parking_lot::Mutex<HashMap<String, (usize, bool)>>);

/// One of them, while it lives.
#[derive(Debug)]
pub(crate) struct Seat {
    of: Arc<Streams>,
    name: String,
}

impl Streams {
    /// Nothing if that one has so many already.
    pub(crate) fn seat(self: &Arc<Self>, name: &str, most: usize) -> Option<Seat> {
        let mut taken = self.0.lock();
        let (count, is_told) = taken.get(name).copied().unwrap_or_default();
        if count >= most {
            if !is_told {
                tracing::warn!(
                    caller = name,
                    most,
                    "further streams are refused: raise http.connections"
                );
                taken.insert(name.to_owned(), (count, true));
            }
            return None;
        }
        taken.insert(name.to_owned(), (count + 1, is_told));
        Some(Seat { of: Arc::clone(self), name: name.to_owned() })
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut taken = self.of.0.lock();
        if let Place::Occupied(mut place) = taken.entry(std::mem::take(&mut self.name)) {
            place.get_mut().0 -= 1;
            if place.get().0 == 0 {
                place.remove();
            }
        }
    }
}

impl Door {
    pub(crate) fn new(
        access: Option<Access>,
        signs_in: bool,
        hosts: Vec<String>,
        listening: SocketAddr,
        is_tls: bool,
        audit: mpsc::Sender<Entry>,
    ) -> Result<Self, AccessError> {
        Ok(Self {
            access,
            signs_in,
            hosts,
            listening,
            is_tls,
            anyone: Secret::random("")?,
            throttle: Mutex::new(Throttle::new(TRIES, WINDOW)),
            turns: Arc::new(Semaphore::new(AT_ONCE)),
            audit,
            streams: Arc::default(),
        })
    }

    /// Named with the port, since browsers share cookies between the ports of a machine.
    pub(crate) fn cookie_name(&self) -> String {
        let prefix = if self.is_tls { "__Host-" } else { "" };
        format!("{prefix}vedetta-{}", self.listening.port())
    }

    pub(crate) fn cookie(&self, value: &str) -> String {
        let secure = if self.is_tls { "; Secure" } else { "" };
        format!("{}={value}; Path=/; HttpOnly; SameSite=Strict{secure}", self.cookie_name())
    }

    /// The value of our cookie, if it could be one of ours.
    pub(crate) fn cookie_of<'a>(&self, headers: &'a HeaderMap) -> Option<&'a str> {
        let name = self.cookie_name();
        let all = headers.get_all(header::COOKIE).iter().filter_map(|value| value.to_str().ok());
        let mut values = all.flat_map(|line| line.split(';')).filter_map(|pair| {
            let (given, value) = pair.trim().split_once('=')?;
            (given == name).then_some(value)
        });
        // With two of them somebody else has set one.
        let value = values.next().filter(|_| values.next().is_none())?;
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_".contains(&byte);
        (value.len() == 43 && value.bytes().all(is_plain)).then_some(value)
    }

    /// Who asks, by what comes with the request. A token counts alone.
    pub(crate) fn caller(&self, headers: &HeaderMap) -> Result<Option<Caller>, ApiError> {
        self.find(headers, Access::by_session)
    }

    /// Who listens still, by what came with the request.
    pub(crate) fn listener(&self, headers: &HeaderMap) -> Result<Option<Caller>, ApiError> {
        self.find(headers, Access::by_idle_session)
    }

    fn find(
        &self,
        headers: &HeaderMap,
        by_session: fn(&Access, &str, SystemTime) -> Result<Option<Identity>, AccessError>,
    ) -> Result<Option<Caller>, ApiError> {
        let cookie = self.cookie_of(headers);
        let Some(access) = self.access.as_ref().filter(|_| self.signs_in) else {
            let ours = cookie.filter(|value| *value == self.anyone.reveal());
            return Ok(Some(Caller {
                name: "local".into(),
                role: Role::Admin,
                scope: Scope::All,
                kind: Kind::Local,
                is_many: true,
                csrf: Some(csrf(ours.unwrap_or(self.anyone.reveal()))),
                expires: None,
            }));
        };
        let now = SystemTime::now();
        if let Some(value) = headers.get(header::AUTHORIZATION) {
            let text = value.to_str().unwrap_or_default();
            let token = text.split_once(' ').filter(|(how, _)| how.eq_ignore_ascii_case("bearer"));
            let Some((_, token)) = token else { return Ok(None) };
            let identity = access.by_token(token.trim(), now)?;
            return Ok(identity.map(|identity| Caller::new(identity, None)));
        }
        let Some(id) = cookie else { return Ok(None) };
        let identity = by_session(access, id, now)?;
        Ok(identity.map(|identity| Caller::new(identity, Some(csrf(id)))))
    }

    pub(crate) async fn record(&self, entry: Entry) {
        // At the end nobody writes any more.
        let _ = self.audit.send(entry).await;
    }
}

impl From<AccessError> for ApiError {
    fn from(error: AccessError) -> Self {
        tracing::error!(error = %vedetta_core::explain(&error), "cannot tell who may do what");
        Self::unavailable("it cannot be told at present who may do what")
    }
}

/// The token that belongs to a session: who knows the id can tell it, and not the other way round.
pub(crate) fn csrf(id: &str) -> String {
    let hash = Sha256::digest(format!("vedetta csrf {id}"));
    BASE64_URL_SAFE_NO_PAD.encode(hash)
}
