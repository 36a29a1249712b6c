//! A real PostgreSQL server: who opens it, what survives it, and what is heard.

use std::error::Error as _;
use std::time::Duration;

use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use testing::postgres::Server;
use testing::{Proxy, soon};
use vedetta_db::Schema;
use vedetta_db::postgres::{Heard, Listener, Postgres, PostgresError};

const FIRST: &str = "CREATE TABLE person (name text NOT NULL); INSERT INTO person VALUES ('Ada');";
const SECOND: &str = "ALTER TABLE person ADD COLUMN born bigint; UPDATE person SET born = 1815;";
const OTHER: Schema = Schema { component: "other", steps: &["CREATE TABLE other (n bigint)"] };

const fn people(steps: &'static [&'static str]) -> Schema {
    Schema { component: "people", steps }
}

async fn open(url: &str) -> Postgres {
    soon("a database opens", Postgres::open(url, &[])).await.unwrap()
}

async fn refused(url: &str, schemas: &[Schema]) -> PostgresError {
    soon("a database is refused", Postgres::open(url, schemas)).await.unwrap_err()
}

/// The first column of all rows, as text.
async fn ask(postgres: &Postgres, query: &str) -> Result<Vec<String>, PostgresError> {
    let client = postgres.client().await?;
    let query = client.prepare_cached(query).await?;
    let rows = client.query(&query, &[]).await?;
    Ok(rows.iter().map(|row| row.get(0)).collect())
}

/// Asks until it is answered; what fails on the way must be such that this makes sense.
async fn ask_until(postgres: &Postgres, query: &str) -> Vec<String> {
    soon("the database answers again", async {
        loop {
            match ask(postgres, query).await {
                Ok(rows) => return rows,
                Err(error) => assert!(error.is_transient(), "{error:?}"),
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await
}

async fn notify(postgres: &Postgres, channel: &str, payload: &str) {
    let client = postgres.client().await.unwrap();
    client.execute("SELECT pg_notify($1, $2)", &[&channel, &payload]).await.unwrap();
}

async fn next(listener: &mut Listener) -> Heard {
    soon("something is heard", listener.next()).await
}

fn notified(payload: &str) -> Heard {
    Heard::Notified(payload.to_owned())
}

/// The same URL by way of the proxy.
fn through(proxy: &Proxy, server: &Server, url: &str) -> String {
    url.replace(&server.address().to_string(), &proxy.address().to_string())
}

#[tokio::test]
async fn tables_are_brought_up_once_though_eight_open_at_the_same_time() {
    let server = Server::start().await;
    let url = server.database().await;
    for steps in [people(&[FIRST]), people(&[FIRST, SECOND])] {
        let mut opening = tokio::task::JoinSet::new();
        for _ in 0..8 {
            let url = url.clone();
            opening.spawn(async move { Postgres::open(&url, &[OTHER, steps]).await.map(drop) });
        }
        let opened = soon("all open", opening.join_all()).await;
        assert!(opened.iter().all(Result::is_ok), "{opened:?}");
        let versions = "SELECT component || version FROM vedetta_schema ORDER BY 1";
        let people = format!("people{}", steps.steps.len());
        assert_eq!(ask(&open(&url).await, versions).await.unwrap(), ["other1".to_owned(), people]);
        assert_eq!(ask(&open(&url).await, "SELECT name FROM person").await.unwrap(), ["Ada"]);
    }
    let born = "SELECT born::text FROM person";
    assert_eq!(ask(&open(&url).await, born).await.unwrap(), ["1815"]);
}

#[tokio::test]
async fn a_step_that_fails_leaves_the_version_before_it_and_no_lock() {
    let server = Server::start().await;
    let url = server.database().await;
    let broken = people(&[FIRST, "CREATE TABLE half (n int); this is not SQL"]);
    let error = refused(&url, &[broken]).await;
    assert!(matches!(&error, PostgresError::Refused { code, .. } if code == "42601"), "{error:?}");
    assert!(error.to_string().contains("syntax error"), "{error}");
    let mended = [people(&[FIRST, SECOND])];
    let opened = soon("nobody holds the lock", Postgres::open(&url, &mended)).await;
    let postgres = opened.unwrap();
    assert!(ask(&postgres, "SELECT n::text FROM half").await.is_err(), "undone whole");
    assert_eq!(ask(&postgres, "SELECT born::text FROM person").await.unwrap(), ["1815"]);
}

#[tokio::test]
async fn a_database_of_a_newer_program_is_refused_and_left_as_it_was() {
    let server = Server::start().await;
    let url = server.database().await;
    Postgres::open(&url, &[people(&[FIRST, SECOND])]).await.unwrap();
    let error = refused(&url, &[OTHER, people(&[FIRST])]).await;
    assert!(matches!(error, PostgresError::Newer { found: 2, known: 1, .. }), "{error:?}");
    let told = error.to_string();
    assert!(told.contains("newer Vedetta (people version 2, this one knows 1)"), "{told}");
    assert!(!error.is_transient());
    let postgres = open(&url).await;
    let tables = "SELECT tablename::text FROM pg_tables WHERE schemaname = 'public' ORDER BY 1";
    assert_eq!(ask(&postgres, tables).await.unwrap(), ["person", "vedetta_schema"]);
    let versions = "SELECT component || version FROM vedetta_schema";
    assert_eq!(ask(&postgres, versions).await.unwrap(), ["people2"]);
}

#[tokio::test]
async fn the_pool_works_again_after_the_server_was_killed_and_after_it_was_stopped() {
    let mut server = Server::start().await;
    let url = server.database().await;
    let postgres = Postgres::open(&url, &[people(&[FIRST])]).await.unwrap();
    let names = "SELECT name FROM person";
    assert_eq!(ask(&postgres, names).await.unwrap(), ["Ada"]);
    for killed in [true, false] {
        // More than one, so that all of the pool are replaced.
        let idle = [postgres.client().await.unwrap(), postgres.client().await.unwrap()];
        drop(idle);
        if killed {
            server.kill();
        } else {
            server.stop();
        }
        let error = ask(&postgres, names).await.unwrap_err();
        assert!(error.is_transient(), "{error:?}");
        server.start_again().await;
        for _ in 0..3 {
            assert_eq!(ask_until(&postgres, names).await, ["Ada"]);
        }
    }
    let name = "SELECT current_setting('application_name')";
    assert_eq!(ask(&postgres, name).await.unwrap(), ["vedetta"]);
}

#[tokio::test]
async fn a_pool_of_two_lets_the_third_wait() {
    let server = Server::start().await;
    let postgres = Postgres::open_with(&server.url(), 2, &[]).await.unwrap();
    let first = postgres.client().await.unwrap();
    let second = postgres.client().await.unwrap();
    let third = tokio::spawn({
        let postgres = postgres.clone();
        async move { ask(&postgres, "SELECT 'mine'").await.unwrap() }
    });
    second.simple_query("SELECT pg_sleep(0.1)").await.unwrap();
    assert!(!third.is_finished());
    drop(second);
    assert_eq!(soon("its turn comes", third).await.unwrap(), ["mine"]);
    drop(first);
}

#[tokio::test]
async fn a_listener_hears_its_channel_only_and_first_says_that_it_listens() {
    let server = Server::start().await;
    let postgres = open(&server.database().await).await;
    let mut listener = postgres.listen("we\"ird Channel");
    assert_eq!(next(&mut listener).await, Heard::Again);
    notify(&postgres, "other", "not for us").await;
    notify(&postgres, "we\"ird Channel", "one").await;
    notify(&postgres, "we\"ird Channel", "").await;
    assert_eq!(next(&mut listener).await, notified("one"));
    assert_eq!(next(&mut listener).await, notified(""));
    // Dropped while it waits, it loses nothing.
    let waits = tokio::time::timeout(Duration::from_millis(50), listener.next()).await;
    assert!(waits.is_err(), "{waits:?}");
    notify(&postgres, "we\"ird Channel", "two").await;
    assert_eq!(next(&mut listener).await, notified("two"));
}

#[tokio::test]
async fn a_listener_that_lost_its_connection_or_its_server_says_so_and_hears_again() {
    let mut server = Server::start().await;
    let url = server.database().await;
    let proxy = Proxy::to(server.address()).await;
    let (postgres, distant) = (open(&url).await, open(&through(&proxy, &server, &url)).await);
    let mut listener = distant.listen("jobs");
    assert_eq!(next(&mut listener).await, Heard::Again);

    proxy.hang_up();
    assert_eq!(next(&mut listener).await, Heard::Again);
    notify(&postgres, "jobs", "after the connection was lost").await;
    assert_eq!(next(&mut listener).await, notified("after the connection was lost"));

    server.kill();
    server.start_again().await;
    assert_eq!(next(&mut listener).await, Heard::Again);
    assert_eq!(ask_until(&postgres, "SELECT 'there'").await, ["there"]);
    notify(&postgres, "jobs", "after the server was lost").await;
    assert_eq!(next(&mut listener).await, notified("after the server was lost"));
}

#[tokio::test]
async fn a_listener_notices_that_its_connection_is_silent() {
    let server = Server::start().await;
    let url = server.database().await;
    let proxy = Proxy::to(server.address()).await;
    let (postgres, distant) = (open(&url).await, open(&through(&proxy, &server, &url)).await);
    let mut listener = distant.listen("jobs");
    assert_eq!(next(&mut listener).await, Heard::Again);
    proxy.silence();
    notify(&postgres, "jobs", "nobody hears").await;
    assert_eq!(next(&mut listener).await, Heard::Again);
    notify(&postgres, "jobs", "all hear").await;
    assert_eq!(next(&mut listener).await, notified("all hear"));
}

#[tokio::test]
async fn who_takes_too_little_is_told_that_something_was_missed_and_hears_on() {
    let server = Server::start().await;
    let postgres = open(&server.database().await).await;
    let mut listener = postgres.listen("many");
    assert_eq!(next(&mut listener).await, Heard::Again);
    let client = postgres.client().await.unwrap();
    notify(&postgres, "many", "first").await;
    let many = "SELECT pg_notify('many', n::text) FROM generate_series(1, 1000) n";
    soon("it is told", async {
        while listener.next().await != Heard::Again {
            client.query(many, &[]).await.unwrap();
        }
    })
    .await;
    notify(&postgres, "many", "last").await;
    soon("it hears on", async {
        while listener.next().await != notified("last") {
            notify(&postgres, "many", "last").await;
        }
    })
    .await;
}

#[tokio::test]
async fn a_wrong_url_or_a_server_that_is_not_there_is_told_clearly_and_no_password_is() {
    let server = Server::start().await;
    let at = server.address();
    let nobody = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    for (url, told, transient) in [
        ("localhost/db".into(), "it is not like postgres://", false),
        ("host=localhost password=hush".into(), "it is not like postgres://", false),
        ("postgres:///db".into(), "it names no host", false),
        ("postgres://me:hush@host:port/db".into(), "invalid value for option `port`", false),
        ("postgres://me:x@hush@host/db".into(), "more than one @", false),
        ("postgres://me@host/db?password=x&hush=1".into(), "no option that Vedetta knows", false),
        (
            format!("postgres://me:hush@{nobody}/db"),
            &*format!("cannot reach PostgreSQL at {nobody}"),
            true,
        ),
        (format!("postgres://me:hush@{at}/db"), "role \"me\" does not exist", false),
        (format!("postgres://postgres:hush@{at}/nodb"), "database \"nodb\" does not exist", false),
    ] {
        let error = refused(&url, &[]).await;
        assert!(error.to_string().contains(told), "{url}: {error}");
        assert_eq!(error.is_transient(), transient, "{url}: {error}");
        let cause = error.source().map(|cause| format!("{cause} {cause:?}"));
        let all = format!("{error} {error:?} {cause:?}");
        assert!(!all.contains("hush"), "{all}");
    }
    let postgres = open(&format!("postgres://postgres:hu?sh@{at}?application_name=mine")).await;
    let name = "SELECT current_setting('application_name')";
    assert_eq!(ask(&postgres, name).await.unwrap(), ["mine"]);
    let error = ask(&postgres, "SELECT '\0'").await.unwrap_err();
    assert!(matches!(error, PostgresError::Misfit(_)), "{error:?}");
    assert!(!error.is_transient(), "what cannot be sent cannot be sent again");
    let listener = postgres.listen("jobs");
    let all = format!("{postgres:?} {listener:?}");
    assert!(all.contains(&at.to_string()) && !all.contains("hu?sh"), "{all}");
}

#[tokio::test]
async fn a_server_that_accepts_and_says_nothing_is_given_up() {
    let server = Server::start().await;
    let proxy = Proxy::to(server.address()).await;
    proxy.cut();
    let url = format!("{}?connect_timeout=1", through(&proxy, &server, &server.url()));
    let error = refused(&url, &[]).await;
    assert!(matches!(error, PostgresError::Unreachable { .. }), "{error:?}");
    assert!(error.to_string().contains(&proxy.address().to_string()), "{error}");
}

/// An authority, and what it signed for `localhost`: its certificate, the server's, the server's key.
fn authority() -> [String; 3] {
    let mut itself = CertificateParams::new([]).unwrap();
    itself.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let its_key = KeyPair::generate().unwrap();
    let certificate = itself.self_signed(&its_key).unwrap().pem();
    let issuer = Issuer::new(itself, its_key);
    let key = KeyPair::generate().unwrap();
    let server = CertificateParams::new(["localhost".to_owned()]).unwrap();
    [certificate, server.signed_by(&key, &issuer).unwrap().pem(), key.serialize_pem()]
}

#[tokio::test]
async fn with_tls_only_a_server_that_an_authority_vouches_for_is_spoken_to() {
    let ([ca, certificate, key], [stranger, ..]) = (authority(), authority());
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let (ours, theirs) = (file("ours%.pem", &ca), file("theirs.pem", &stranger));
    let server = Server::start_with_tls(&certificate, &key).await;
    let port = server.address().port();
    let url = |host: &str, mode: &str, file: &str| {
        let file = file.replace('%', "%25");
        format!("postgres://postgres@{host}:{port}/postgres?sslmode={mode}&sslrootcert={file}")
    };
    let encrypted = "SELECT ssl::text FROM pg_stat_ssl WHERE pid = pg_backend_pid()";
    for mode in ["require", "verify-full"] {
        let postgres = open(&url("localhost", mode, &ours)).await;
        assert_eq!(ask(&postgres, encrypted).await.unwrap(), ["true"]);
        let mut listener = postgres.listen("jobs");
        assert_eq!(next(&mut listener).await, Heard::Again);
        notify(&postgres, "jobs", "in secret").await;
        assert_eq!(next(&mut listener).await, notified("in secret"));
    }
    assert_eq!(ask(&open(&server.url()).await, encrypted).await.unwrap(), ["false"]);

    for (host, file) in [("localhost", &theirs), ("127.0.0.1", &ours)] {
        let error = refused(&url(host, "require", file), &[]).await;
        assert!(matches!(error, PostgresError::Misfit(_)), "{error:?}");
        assert!(format!("{error:?}").contains("Certificate"), "{error:?}");
    }
    let plain = Server::start().await;
    let url = url("localhost", "require", &ours);
    let url = url.replace(&port.to_string(), &plain.address().port().to_string());
    let error = refused(&url, &[]).await;
    assert!(format!("{error:?}").contains("does not support TLS"), "{error:?}");
}
