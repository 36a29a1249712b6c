//! Which server, and how it is spoken to.

use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use percent_encoding::percent_decode_str;
use tokio_postgres::Config;
use tokio_postgres::config::{Host, SslMode};

use super::PostgresError;
use super::tls::Tls;

/// Unless the URL says otherwise; in seconds. A host has 10 to be connected to. A connection on which
/// nothing comes for 15 is asked every 5, and given up after 3 that stay without an answer, or when what
/// was sent is not confirmed for 30.
const DEFAULTS: &str = "application_name=vedetta&connect_timeout=10&keepalives_idle=15\
                        &keepalives_interval=5&keepalives_retries=3&tcp_user_timeout=30";

/// Where connections go.
#[derive(Clone)]
pub(super) struct Target {
    pub(super) config: Arc<Config>,
    pub(super) tls: Tls,
    /// Hosts and ports, to be shown.
    pub(super) at: Arc<str>,
    /// Until a connection can be used.
    pub(super) patience: Duration,
}

impl Target {
    /// Of the URL no text but option names gets into an error: what is misread may be of a password.
    pub(super) fn parse(url: &str) -> Result<Self, PostgresError> {
        let bad = |why: &str| PostgresError::BadUrl(why.to_owned());
        if !url.starts_with("postgres://") && !url.starts_with("postgresql://") {
            return Err(bad("it is not like postgres://user:password@host:5432/database"));
        }
        if url.matches('@').count() > 1 {
            return Err(bad("it has more than one @; inside of names and passwords write %40"));
        }
        let (url, trusted) = with_defaults(url);
        let mut config: Config = url.parse().map_err(|error: tokio_postgres::Error| {
            let why = error.source().map(ToString::to_string).unwrap_or_default();
            // These tell the name of an option only.
            let known = why.starts_with("invalid value for option");
            bad(if known { &why } else { "after the ? is what is no option that Vedetta knows" })
        })?;
        if config.get_hosts().is_empty() && config.get_hostaddrs().is_empty() {
            return Err(bad("it names no host"));
        }
        let tls = match (config.get_ssl_mode(), trusted) {
            (SslMode::Require, Some(file)) => Tls::trust(&file).map_err(PostgresError::BadUrl)?,
            (SslMode::Require, None) => {
                return Err(bad(
                    "sslmode=require wants sslrootcert=FILE, certificates of who may sign the server's",
                ));
            }
            (_, Some(_)) => return Err(bad("sslrootcert wants sslmode=require")),
            (_, None) => Tls::none(),
        };
        if config.get_ssl_mode() == SslMode::Prefer {
            config.ssl_mode(SslMode::Disable);
        }
        let connect = config.get_connect_timeout().copied().unwrap_or_default();
        let hosts = config.get_hosts().len().max(config.get_hostaddrs().len());
        let hosts = u32::try_from(hosts).unwrap_or(u32::MAX);
        let patience = connect.saturating_mul(hosts.saturating_add(1));
        Ok(Self { at: at(&config).into(), config: Arc::new(config), tls, patience })
    }

    /// What became of an attempt to connect.
    pub(super) fn failed(&self, error: tokio_postgres::Error) -> PostgresError {
        match error.into() {
            PostgresError::Lost(source) => self.unreachable(source),
            other => other,
        }
    }

    pub(super) fn unreachable(&self, source: Box<dyn Error + Send + Sync>) -> PostgresError {
        PostgresError::Unreachable { at: self.at.to_string(), source }
    }
}

/// Puts the defaults before the options, of which the later ones count, and takes out `sslrootcert`, which
/// the parser does not know; `verify-full` is what our `require` does.
fn with_defaults(url: &str) -> (String, Option<String>) {
    // A password may have a question mark.
    let options = url.find('@').unwrap_or(0);
    let options = url[options..].find('?').map_or(url.len(), |at| options + at);
    let (start, options) = url.split_at(options);
    let mut trusted = None;
    let mut all = format!("{start}?{DEFAULTS}");
    for option in options.strip_prefix('?').into_iter().flat_map(|options| options.split('&')) {
        let option = match option.split_once('=') {
            Some(("sslrootcert", file)) => {
                trusted = Some(percent_decode_str(file).decode_utf8_lossy().into_owned());
                continue;
            }
            Some(("sslmode", "verify-full")) => "sslmode=require",
            _ => option,
        };
        all.extend(["&", option]);
    }
    (all, trusted)
}

fn at(config: &Config) -> String {
    let hosts = config.get_hosts().iter().map(|host| match host {
        Host::Tcp(name) if name.contains(':') => format!("[{name}]"),
        Host::Tcp(name) => name.clone(),
        Host::Unix(folder) => folder.display().to_string(),
    });
    let addresses = config.get_hostaddrs().iter().map(ToString::to_string);
    let hosts: Vec<_> =
        if config.get_hosts().is_empty() { addresses.collect() } else { hosts.collect() };
    // One port may stand for all hosts.
    let ports = config.get_ports();
    let port = |at: usize| ports.get(at).or(ports.first()).copied().unwrap_or(5432);
    let all = hosts.iter().enumerate().map(|(at, host)| format!("{host}:{}", port(at)));
    all.collect::<Vec<_>>().join(", ")
}
