//! Requests that no honest client sends.

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use vedetta_access::Role;

use crate::support::PATIENCE;
use crate::{Guarded, escaped, job};

/// Sends bytes as they are; the answer as it is.
async fn raw(guarded: &Guarded, bytes: &[u8]) -> String {
    let mut line = TcpStream::connect(guarded.server.address).await.unwrap();
    let talk = async {
        // It may hang up before it has heard everything.
        let _ = line.write_all(bytes).await;
        let _ = line.shutdown().await;
        let mut answer = Vec::new();
        let _ = line.read_to_end(&mut answer).await;
        String::from_utf8_lossy(&answer).into_owned()
    };
    tokio::time::timeout(PATIENCE, talk).await.expect("it does not hang")
}

#[tokio::test]
async fn malformed_and_oversized_requests_are_refused_and_nothing_breaks() {
    let guarded = Guarded::start().await;
    let admin = guarded.token("a", Role::Admin);
    let head = format!("Host: {}\r\nAuthorization: {admin}\r\n", guarded.server.address);
    let many = "X: y\r\n".repeat(300);
    let (long, path) = ("x".repeat(1 << 20), "/a".repeat(40_000));
    let json = "Content-Type: application/json\r\n";
    let large = 3 << 20;
    // What may be answered; to what is no HTTP also nothing at all, which is 0.
    let cases: Vec<(&str, &[u16], Vec<u8>)> = vec![
        ("no request", &[0], b"\r\n\r\n\r\n".to_vec()),
        ("nonsense", &[400], b"\x00\x01\x02\xff\xfe\r\n\r\n".to_vec()),
        ("HTTP/2", &[0], b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec()),
        ("no version", &[400], format!("GET /api/v1/jobs\r\n{head}\r\n").into()),
        ("HTTP/9", &[400], format!("GET /api/v1/jobs HTTP/9.9\r\n{head}\r\n").into()),
        ("no host", &[421], format!("GET /api/v1/jobs HTTP/1.1\r\nAuthorization: {admin}\r\n\r\n").into()),
        ("two hosts", &[421], format!("GET /api/v1/jobs HTTP/1.1\r\n{head}Host: evil\r\n\r\n").into()),
        ("many headers", &[431], format!("GET /api/v1/jobs HTTP/1.1\r\n{head}{many}\r\n").into()),
        ("a long header", &[431], format!("GET /api/v1/jobs HTTP/1.1\r\n{head}X: {long}\r\n\r\n").into()),
        ("a long path", &[414], format!("GET {path} HTTP/1.1\r\n{head}\r\n").into()),
        ("a long query", &[431], format!("GET /api/v1/jobs?q={long} HTTP/1.1\r\n{head}\r\n").into()),
        ("a nul", &[400], format!("GET /api/v1/jobs HTTP/1.1\r\n{head}X: a\0b\r\n\r\n").into()),
        ("a bare return", &[400], format!("GET /api/v1/jobs HTTP/1.1\r\n{head}X: a\rb\r\n\r\n").into()),
        ("a folded header", &[400], format!("GET /api/v1/jobs HTTP/1.1\r\n{head}X: a\r\n b\r\n\r\n").into()),
        ("a space before the colon", &[400], format!("GET /api/v1/jobs HTTP/1.1\r\n{head}X : a\r\n\r\n").into()),
        ("two lengths", &[400], format!("POST /api/v1/jobs HTTP/1.1\r\n{head}{json}Content-Length: 2\r\nContent-Length: 3\r\n\r\n{{}}").into()),
        ("a length that is none", &[400], format!("POST /api/v1/jobs HTTP/1.1\r\n{head}{json}Content-Length: -1\r\n\r\n").into()),
        ("a coding that is none", &[400], format!("POST /api/v1/jobs HTTP/1.1\r\n{head}{json}Transfer-Encoding: gzip\r\n\r\n").into()),
        ("a chunk that is none", &[400], format!("POST /api/v1/jobs HTTP/1.1\r\n{head}{json}Transfer-Encoding: chunked\r\n\r\nzz\r\n").into()),
        ("half a body", &[400], format!("POST /api/v1/jobs HTTP/1.1\r\n{head}{json}Content-Length: 100\r\n\r\n{{").into()),
        ("a large body", &[413], format!("PUT /api/v1/kv/k HTTP/1.1\r\n{head}{json}Content-Length: {large}\r\n\r\n{}", "x".repeat(large)).into()),
        ("a large body in chunks", &[413], format!("PUT /api/v1/kv/k HTTP/1.1\r\n{head}{json}Transfer-Encoding: chunked\r\n\r\n{large:x}\r\n{}\r\n0\r\n\r\n", "x".repeat(large)).into()),
        ("no JSON", &[400], format!("POST /api/v1/jobs HTTP/1.1\r\n{head}{json}Content-Length: 2\r\n\r\n{{]").into()),
        ("JSON without end", &[422], format!("POST /api/v1/jobs HTTP/1.1\r\n{head}{json}Content-Length: 100000\r\n\r\n{}", "[".repeat(100_000)).into()),
        ("no UTF-8", &[400], [format!("POST /api/v1/jobs HTTP/1.1\r\n{head}{json}Content-Length: 4\r\n\r\n").as_bytes(), b"\"\xff\xfe\""].concat()),
        ("a bad escape", &[422], format!("GET /api/v1/jobs/%zz HTTP/1.1\r\n{head}\r\n").into()),
        ("no UTF-8 in a path", &[422], format!("GET /api/v1/queues/%ff%fe/wake HTTP/1.1\r\n{head}\r\n").into()),
        ("no UTF-8 in a query", &[422], format!("GET /api/v1/jobs?q=%ff HTTP/1.1\r\n{head}\r\n").into()),
        ("up and out", &[404], format!("GET /assets/../../../../etc/passwd HTTP/1.1\r\n{head}\r\n").into()),
        ("up and out, hidden", &[404], format!("GET /assets/%2e%2e%2f%2e%2e%2fetc%2fpasswd HTTP/1.1\r\n{head}\r\n").into()),
        ("the whole address", &[404], format!("GET http://evil.example/api/v1/nothing HTTP/1.1\r\n{head}\r\n").into()),
        ("a tunnel", &[404], format!("CONNECT evil.example:80 HTTP/1.1\r\n{head}\r\n").into()),
        ("a form that is large", &[413], format!("POST /login HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/x-www-form-urlencoded\r\nContent-Length: 200000\r\n\r\n{}", "a=b&".repeat(50_000)).into()),
    ];
    let mut wrong = Vec::new();
    for (what, may, bytes) in cases {
        let answer = raw(&guarded, &bytes).await;
        let status = answer.split(' ').nth(1).map_or(0, |status| status.parse().unwrap());
        if !may.contains(&status) {
            wrong.push(format!("{what}: {may:?}: {answer}"));
        }
        assert!(!answer.contains("root:"), "{what}: {answer}");
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    let added = guarded.tells("POST /api/v1/jobs", &admin, job(&1.into())).await;
    assert_eq!(added.status, 201, "it still serves: {added:?}");
    guarded.end().await;
}

#[tokio::test]
async fn nothing_that_is_echoed_becomes_a_header() {
    let guarded = Guarded::start().await;
    guarded.user("anna", Role::Viewer).await;
    let evil = "%0d%0aX-Evil:%201%0d%0a%0d%0a%3Cscript%3E";
    let page = [("Accept", "text/html")];
    let form = guarded.form().await;
    let sign_in = format!("name=anna&password=correct+horse&next=/{evil}");
    let answers = [
        guarded.server.send(&format!("GET /{evil}"), &page, "").await,
        guarded.server.send(&format!("GET /login?next=/{evil}"), &page, "").await,
        guarded.server.send(&format!("GET /jobs?x={evil}"), &page, "").await,
        guarded.post(&form, "/login", &sign_in).await,
        guarded
            .post(&guarded.form().await, "/login", &format!("name={evil}&password=x&next={evil}"))
            .await,
        guarded.server.send("GET /healthz", &[("Host", "a\"b<script>")], "").await,
        guarded
            .server
            .send(
                "GET /login",
                &[("Cookie", &format!("vedetta-{}={evil}", guarded.server.address.port()))],
                "",
            )
            .await,
    ];
    for answer in answers {
        assert!(!answer.head.lines().any(|line| line.starts_with("x-evil")), "{answer:?}");
        assert!(
            !answer.body.contains("<script>") || answer.head.contains("application/json"),
            "{answer:?}"
        );
        assert!(answer.head.contains("x-content-type-options: nosniff"), "{answer:?}");
        assert!(answer.head.contains("default-src 'none'"), "{answer:?}");
    }
    guarded.end().await;
}

#[tokio::test]
async fn after_signing_in_nobody_is_sent_elsewhere() {
    let guarded = Guarded::start().await;
    guarded.user("anna", Role::Viewer).await;
    for (next, to) in [
        ("/jobs?status=dead", "/jobs?status=dead"),
        ("https://evil.example/", "/"),
        ("//evil.example/", "/"),
        ("/\\evil.example/", "/"),
        ("javascript:alert(1)", "/"),
    ] {
        let next = escaped(next);
        let form = guarded.form().await;
        let body = format!("name=anna&password=correct+horse&next={next}");
        let answer = guarded.post(&form, "/login", &body).await;
        assert!(answer.head.contains(&format!("location: {to}\r\n")), "{next}: {answer:?}");
    }
    guarded.end().await;
}
