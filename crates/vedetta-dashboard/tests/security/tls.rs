//! HTTP over TLS.

use std::time::Duration;

use rustls::pki_types::ServerName;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use vedetta_access::{Access, Role, Scope};
use vedetta_dashboard::Limits;
use vedetta_net::tls::{ClientTls, HTTP1, TlsFiles};

use crate::support::{PATIENCE, Server};

/// A server with a certificate for `localhost`, and what a client needs to believe it.
async fn start(limits: Limits) -> (Server, Access, TlsConnector, tempfile::TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let (cert, key) = (folder.path().join("cert"), folder.path().join("key"));
    std::fs::write(&cert, made.cert.pem()).unwrap();
    std::fs::write(&key, made.signing_key.serialize_pem()).unwrap();
    let access = Access::open(folder.path()).unwrap();
    let tls = TlsFiles { cert: cert.clone(), key, client_ca: None }.load().unwrap();
    let with = access.clone();
    let server = Server::start().await;
    let server = server.serve_as(|api| api.access(with, true).tls(tls).limits(limits)).await;
    let known = ClientTls { ca: cert, cert: None, key: None }.load(&[HTTP1]).unwrap();
    (server, access, TlsConnector::from(known), folder)
}

async fn ask(server: &Server, tls: &TlsConnector, request: &str) -> String {
    let line = TcpStream::connect(server.address).await.unwrap();
    let mut line = tls.connect(ServerName::try_from("localhost").unwrap(), line).await.unwrap();
    line.write_all(request.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    let _ = line.read_to_end(&mut answer).await;
    String::from_utf8(answer).unwrap()
}

#[tokio::test]
async fn over_tls_cookies_are_for_tls_and_this_host_only() {
    let (server, access, tls, _folder) = start(Limits::default()).await;
    let head = "Host: localhost\r\nConnection: close\r\n";
    let page = ask(&server, &tls, &format!("GET /login HTTP/1.1\r\n{head}\r\n")).await;
    let port = server.address.port();
    assert!(page.contains(&format!("set-cookie: __Host-vedetta-{port}=")), "{page}");
    assert!(page.contains("; Path=/; HttpOnly; SameSite=Strict; Secure"), "{page}");
    let token = access.add_token("t", Role::Viewer, &Scope::All, None).unwrap();
    let head = format!("{head}Authorization: Bearer {}\r\n", token.reveal());
    let jobs = ask(&server, &tls, &format!("GET /api/v1/jobs HTTP/1.1\r\n{head}\r\n")).await;
    assert!(jobs.starts_with("HTTP/1.1 200"), "{jobs}");
    // Whoever does not speak TLS is told nothing.
    let plain = server.get("/healthz").await;
    assert_eq!(plain.status, 0, "{plain:?}");
    server.end().await;
}

#[tokio::test]
async fn who_begins_a_handshake_and_falls_silent_is_let_go() {
    let limits = Limits { handshake: Duration::from_secs(1), ..Limits::default() };
    let (server, _access, tls, _folder) = start(limits).await;
    let mut line = TcpStream::connect(server.address).await.unwrap();
    line.write_all(&[22, 3, 1, 2, 0, 1, 0, 1, 0xfc]).await.unwrap();
    let mut rest = Vec::new();
    let ended = tokio::time::timeout(PATIENCE, line.read_to_end(&mut rest)).await;
    assert!(ended.is_ok(), "it is still there");
    let health =
        ask(&server, &tls, "GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
    assert!(health.await.starts_with("HTTP/1.1 200"));
    server.end().await;
}
