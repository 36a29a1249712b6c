//! The pages as they come over the wire, without a browser: what they show, and what their forms do.

use serde_json::{Value, json};
use vedetta_jobs::{Fate, Jobs as _, Ledger as _, Mode, NewJob, Wanted};
use vedetta_kv::Put;

use crate::support::{Answer, PATIENCE, Server};

const PAGES: [&str; 9] =
    ["/", "/jobs", "/failed", "/queues", "/workers", "/stages", "/watchers", "/kv", "/insights"];
const HOSTILE: &str = r#"<img src=x onerror=alert(1)>"'</script><script>alert(2)</script>"#;

async fn form(server: &Server, path: &str, fields: &str) -> Answer {
    let typed = ("Content-Type", "application/x-www-form-urlencoded");
    server.send(&format!("POST {path}"), &[typed], fields).await
}

/// A job that is dead of this error.
async fn dead(server: &Server, queue: &str, error: &str) -> u64 {
    let job = NewJob::new("pack").queue(queue);
    let id = server.jobs.enqueue(&[job]).await.unwrap()[0].id;
    let lease = std::time::Duration::from_secs(30);
    let wanted = Wanted { queue, worker: "anna", room: 1, capacity: 1, lease };
    let given = server.jobs.take(&wanted).await.unwrap().jobs.remove(0);
    assert_eq!(given.claim.id, id);
    server.jobs.settle(&[(given.claim, Fate::Dead { error: error.into() })]).await.unwrap();
    id.0
}

async fn status(server: &Server, id: u64) -> String {
    server.get(&format!("/api/v1/jobs/{id}")).await.json()["status"]
        .as_str()
        .unwrap_or("gone")
        .to_owned()
}

#[tokio::test]
async fn every_page_is_served_whole_by_the_program_alone() {
    let server = Server::start().await;
    let id = dead(&server, "default", "no").await;
    let one = format!("/jobs/{id}");
    for path in PAGES.into_iter().chain([one.as_str()]) {
        let page = server.get(path).await;
        assert_eq!(page.status, 200, "{path}");
        assert!(page.head.contains("content-type: text/html; charset=utf-8"), "{path}");
        for wanted in [
            "<!DOCTYPE html>",
            "<main",
            "<h1>",
            "href=\"#main\"",
            "lang=\"en\"",
            "aria-current=\"page\"",
        ] {
            assert!(page.body.contains(wanted), "{path} lacks {wanted}");
        }
        for forbidden in
            ["<script>", "<style", " style=", " onclick=", " onload=", "http://", "https://"]
        {
            assert!(!page.body.contains(forbidden), "{path} has {forbidden}");
        }
        for form in page.body.split("<form").skip(1) {
            let form = form.split("</form>").next().unwrap();
            assert!(
                !form.contains("method=\"post\"") || form.contains("name=\"csrf\""),
                "{path}: {form}"
            );
        }
        for asset in page.body.split('"').filter(|piece| piece.starts_with("/assets/")) {
            let answer = server.get(asset).await;
            assert_eq!(answer.status, 200, "{asset}");
            assert!(
                answer.head.contains("cache-control: public, max-age=31536000, immutable"),
                "{asset}"
            );
            assert!(answer.head.contains("content-security-policy"), "{asset}");
        }
    }
    assert_eq!(server.get("/assets/0123456789abcdef/page.js").await.status, 404);
    let missing = server.get("/jobs/999").await;
    assert_eq!(missing.status, 404);
    assert!(missing.body.contains("there is no job 999") && missing.body.contains("<main"));
    assert_eq!(server.get("/jobs?status=sleepy").await.status, 422);
    assert_eq!(server.get("/jobs/x").await.status, 422);
    server.end().await;
}

#[tokio::test]
async fn every_route_of_the_old_dashboard_has_its_counterpart() {
    let server = Server::start().await;
    let id = dead(&server, "default", "no").await;
    // dashboard, poll, jobs, a job, failed, workers, metrics
    for path in [
        "/",
        "/api/v1/overview",
        "/jobs",
        &format!("/jobs/{id}"),
        "/failed",
        "/workers",
        "/insights",
        "/metrics",
    ] {
        assert_eq!(server.get(path).await.status, 200, "{path}");
    }
    assert_eq!(form(&server, &format!("/jobs/{id}/retry"), "").await.status, 303);
    // start a worker, stop one
    server.post("/workers/w1/beat", beat()).await;
    server.post("/supervisors/boss:anna/beat", report()).await;
    assert_eq!(form(&server, "/workers/start", "queue=default&count=1").await.status, 303);
    assert_eq!(form(&server, "/workers/w1/stop", "").await.status, 303);
    server.end().await;
}

#[tokio::test]
async fn an_empty_page_teaches_the_next_command() {
    let server = Server::start().await;
    for (path, command) in [
        ("/", "vedetta job add"),
        ("/jobs", "vedetta job add"),
        ("/queues", "vedetta job add"),
        ("/workers", "[handler.hello]"),
        ("/stages", "cargo run --release -p orders"),
        ("/watchers", "[watch.rooms]"),
        ("/kv", "vedetta kv put"),
    ] {
        let page = server.get(path).await.body;
        assert!(page.contains(command), "{path}: {page}");
    }
    server.end().await;
}

#[tokio::test]
async fn forms_do_what_they_say_and_lead_back() {
    let server = Server::start().await;
    let id = dead(&server, "mail", "no").await;
    let back = "back=%2Fjobs%3Fqueue%3Dmail";
    let retried = form(&server, &format!("/jobs/{id}/retry"), back).await;
    assert_eq!(retried.status, 303, "{retried:?}");
    let to = format!("/jobs?queue=mail&said=retry-{id}");
    assert!(retried.head.contains(&format!("location: {to}")), "{}", retried.head);
    assert_eq!(status(&server, id).await, "waiting");
    let page = server.get(&to).await;
    assert!(page.body.contains(&format!("Job {id} is to be tried again.")), "it says so");
    assert!(page.body.contains("value=\"/jobs?queue=mail\""), "and forgets it the next time");

    let again = form(&server, &format!("/jobs/{id}/retry"), back).await;
    assert_eq!(again.status, 409);
    assert!(again.body.contains("is waiting") && again.body.contains("<main"), "for people");
    let typed = ("Content-Type", "application/x-www-form-urlencoded");
    let asked = [typed, ("Accept", "application/json")];
    let again = server.send(&format!("POST /jobs/{id}/retry"), &asked, back).await;
    assert_eq!((again.status, again.code()), (409, "conflict".into()), "for scripts");
    let cancelled = server.send(&format!("POST /jobs/{id}/cancel"), &asked, back).await;
    assert_eq!(cancelled.json(), json!({"said": format!("Job {id} was cancelled.")}));
    assert_eq!(status(&server, id).await, "cancelled");
    assert_eq!(form(&server, &format!("/jobs/{id}/delete"), "").await.status, 303);
    assert_eq!(server.get(&format!("/api/v1/jobs/{id}")).await.status, 404);

    let mistyped = form(&server, "/queues/mial/pause", "back=/queues").await;
    assert_ne!((mistyped.status, mistyped.head.contains("said=paused")), (303, true));
    assert!(!server.jobs.queues().await.unwrap().iter().any(|queue| queue.name == "mial"));
    for (what, mode) in [("pause", Mode::Paused), ("drain", Mode::Draining), ("resume", Mode::Open)]
    {
        assert_eq!(
            form(&server, &format!("/queues/mail/{what}"), "back=/queues").await.status,
            303
        );
        let queues = server.jobs.queues().await.unwrap();
        assert_eq!(queues.iter().find(|queue| queue.name == "mail").unwrap().mode, mode, "{what}");
    }
    server.end().await;
}

#[tokio::test]
async fn all_that_failed_and_match_are_retried_at_once() {
    let server = Server::start().await;
    let mut mail = Vec::new();
    for n in 0..3 {
        mail.push(dead(&server, "mail", &format!("timeout {n}")).await);
    }
    let other = dead(&server, "media", "timeout").await;
    let page = server.get("/failed?queue=mail").await.body;
    assert!(page.contains("timeout 2") && page.contains("Retry all that match"), "{page}");
    assert!(!page.contains(&format!("data-job=\"{other}\"")));
    let done = form(&server, "/failed/retry", "queue=mail&back=/failed").await;
    assert!(done.head.contains("location: /failed?said=retried-3"), "{}", done.head);
    for id in mail {
        assert_eq!(status(&server, id).await, "waiting");
    }
    assert_eq!(status(&server, other).await, "dead");
    server.end().await;
}

#[tokio::test]
async fn a_list_is_narrowed_and_paged_by_its_address_alone() {
    let server = Server::start().await;
    let jobs: Vec<NewJob> = (0..120)
        .map(|n| {
            NewJob::new(if n % 2 == 0 { "even" } else { "odd" }).queue(if n < 60 {
                "a/b"
            } else {
                "c"
            })
        })
        .collect();
    server.jobs.enqueue(&jobs).await.unwrap();
    let ids = |page: &str| -> Vec<u64> {
        let rows = page.split("<tr data-job=\"").skip(1).filter_map(|row| row.split('"').next());
        rows.filter_map(|id| id.parse().ok()).collect()
    };
    let mut next = Some("/jobs?kind=even&status=waiting&tag=&q=".to_owned());
    let mut seen = Vec::new();
    while let Some(address) = next {
        let page = server.get(&address).await;
        assert_eq!(page.status, 200, "{address}");
        seen.extend(ids(&page.body));
        let older = page.body.split("<a href=\"").find(|link| link.contains("Older"));
        next = older.map(|link| link.split('"').next().unwrap().replace("&amp;", "&"));
    }
    assert_eq!(seen, (1..=120).rev().filter(|id| id % 2 == 1).collect::<Vec<u64>>());
    let page = server.get("/jobs?queue=a%2Fb&cursor=3").await.body;
    assert_eq!(ids(&page), [2, 1]);
    assert!(page.contains("‹ Newest"));
    server.end().await;
}

#[tokio::test]
async fn a_form_of_another_site_is_refused_and_the_way_back_stays_here() {
    let server = Server::start().await;
    let id = dead(&server, "mail", "no").await;
    let typed = ("Content-Type", "application/x-www-form-urlencoded");
    let own = format!("http://{}", server.address);
    for (header, value, expected) in [
        ("Origin", "http://evil.example", 403),
        ("Origin", "null", 403),
        ("Sec-Fetch-Site", "cross-site", 403),
        ("Sec-Fetch-Site", "same-site", 403),
        // Not without the token of the page that it comes from.
        ("Origin", own.as_str(), 403),
    ] {
        let answer =
            server.send(&format!("POST /jobs/{id}/retry"), &[typed, (header, value)], "").await;
        assert_eq!(answer.status, expected, "{header}: {value}");
    }
    let page = server.get("/jobs").await;
    let after = |text: &str, mark: &str, end: char| {
        let rest = text.split_once(mark).unwrap_or_else(|| panic!("{mark} in {text}")).1;
        rest.split(end).next().unwrap().to_owned()
    };
    let cookie = after(&page.raw, "set-cookie: ", ';');
    let csrf = format!("csrf={}", after(&page.body, "name=\"csrf\" value=\"", '"'));
    let browser = [typed, ("Origin", own.as_str()), ("Cookie", cookie.as_str())];
    let answer = server.send(&format!("POST /jobs/{id}/retry"), &browser, &csrf).await;
    assert_eq!(answer.status, 303, "{answer:?}");
    for back in
        ["https%3A%2F%2Fevil.example", "%2F%2Fevil.example", "%2F%5Cevil.example", "%2F%0D%0AX-A:b"]
    {
        let answer = form(&server, "/queues/mail/pause", &format!("back={back}")).await;
        assert!(answer.head.contains("location: /?said=paused"), "{back}: {}", answer.head);
    }
    let json = ("Content-Type", "application/json");
    assert_eq!(server.send("POST /queues/mail/pause", &[json], "{}").await.status, 415);
    let large = format!("back={}", "a".repeat(100_000));
    assert_eq!(form(&server, "/queues/mail/pause", &large).await.status, 413);
    assert_eq!(server.get("/queues/mail/pause").await.status, 405, "reading changes nothing");
    server.end().await;
}

#[tokio::test]
async fn the_theme_is_chosen_by_a_form_and_kept_in_a_cookie() {
    let server = Server::start().await;
    assert!(!server.get("/").await.body.contains("data-theme"));
    let chosen = form(&server, "/theme", "theme=dark&back=%2Fjobs").await;
    assert!(chosen.head.contains("location: /jobs"), "{}", chosen.head);
    assert!(chosen.head.contains("set-cookie: vedetta-theme=dark;"), "{}", chosen.head);
    let cookie = [("Cookie", "a=b; vedetta-theme=dark")];
    assert!(server.send("GET /", &cookie, "").await.body.contains("data-theme=\"dark\""));
    let hostile = [("Cookie", "vedetta-theme=\"><script>alert(1)</script>")];
    assert!(!server.send("GET /", &hostile, "").await.body.contains("alert"));
    server.end().await;
}

#[tokio::test]
async fn what_people_write_is_shown_and_never_obeyed() {
    let server = Server::start().await;
    let job = NewJob { tags: vec!["x".into()], ..NewJob::new("pack") };
    let job = job.payload(&json!({ "name": HOSTILE })).unwrap().unique(HOSTILE);
    server.jobs.enqueue(&[job]).await.unwrap();
    let lease = std::time::Duration::from_secs(30);
    let wanted = Wanted { queue: "default", worker: "anna", room: 1, capacity: 1, lease };
    let given = server.jobs.take(&wanted).await.unwrap().jobs.remove(0);
    let note = vedetta_jobs::Note {
        progress: Some(0.5),
        message: Some(HOSTILE.into()),
        log: HOSTILE.into(),
    };
    server.jobs.keep(&[(given.claim, note)]).await.unwrap();
    let (running, log) = (server.get("/jobs").await.body, server.get("/jobs/1").await.body);
    server.jobs.settle(&[(given.claim, Fate::Dead { error: HOSTILE.into() })]).await.unwrap();
    server.store.put(Put::new(HOSTILE, HOSTILE)).await.unwrap();
    let mut pages = vec![running, log];
    let asked = "%3Cscript%3Ealert(1)%3C/script%3E";
    for path in [
        "/",
        "/jobs",
        "/jobs/1",
        "/failed",
        "/kv",
        &format!("/jobs?q={asked}&queue={asked}&kind={asked}&tag={asked}"),
        &format!("/failed?q={asked}"),
        &format!("/kv?prefix={asked}"),
        &format!("/jobs?status={asked}"),
        &format!("/jobs?said={asked}"),
        &format!("/jobs/{asked}"),
        &format!("/insights?queue={asked}"),
        &format!("/insights?range={asked}"),
    ] {
        pages.push(server.get(path).await.body);
    }
    for page in &pages {
        assert!(!page.contains("<img src=x") && !page.contains("<script>"), "{page}");
    }
    assert!(
        pages[0].contains("&lt;img src=x") && pages[1].contains("&lt;img src=x"),
        "it is shown"
    );
    assert!(pages[6].contains("&lt;img src=x"), "keys and values, too");
    server.end().await;
}

fn beat() -> Value {
    json!({"queues": ["default"], "supervisor": "boss:anna", "pid": 4711, "host": "anna",
        "version": "1", "started": 1, "birth": "a:1", "state": "running", "running": [3],
        "slots": {"used": 1, "capacity": 2}, "done": []})
}

fn report() -> Value {
    json!({"host": "anna", "version": "1", "instance": "i", "queues": ["default"],
        "balance": "auto", "min": 1, "max": 3, "wanted": 2, "state": "crash-looping",
        "last_exit": "exit code 7", "stderr": HOSTILE, "ended": [], "done": [], "depths": false})
}

/// What it is told, once there is something.
async fn hears(server: &Server, path: &str, beat: &Value) -> Value {
    let wait = async {
        loop {
            let heard = server.post(path, beat.clone()).await;
            if heard["commands"] != json!([]) {
                return heard["commands"].clone();
            }
        }
    };
    tokio::time::timeout(PATIENCE, wait).await.expect("a command")
}

#[tokio::test]
async fn workers_and_their_supervisors_are_shown_and_steered() {
    let server = Server::start().await;
    let (worker, boss) = ("/workers/w1/beat", "/supervisors/boss:anna/beat");
    server.post(worker, beat()).await;
    server.post(boss, report()).await;
    let page = server.get("/workers").await.body;
    for shown in
        ["4711 on anna", "/workers/w1/pause", "boss:anna on anna", "crash-looping", "exit code 7"]
    {
        assert!(page.contains(shown), "{shown} in {page}");
    }
    assert!(page.contains("&lt;img src=x") && !page.contains("<img src=x"), "{page}");

    for (path, fields, said, command) in [
        ("/workers/w1/pause", "", "pause", "pause"),
        ("/workers/w1/resume", "", "resume", "resume"),
        ("/workers/w1/stop", "", "stop", "stop"),
        ("/workers/start", "&queue=default&count=1", "started-1", "start default 1"),
        ("/workers/restart", "", "restart", "restart"),
        ("/workers/terminate", "", "terminate", "terminate"),
    ] {
        let answer = form(&server, path, &format!("back=%2Fworkers{fields}")).await;
        let to = format!("location: /workers?said={said}\r\n");
        assert!(answer.head.contains(&to), "{path}: {answer:?}");
        let heard = if path.contains("w1") {
            hears(&server, worker, &beat()).await
        } else {
            hears(&server, boss, &report()).await
        };
        assert_eq!(heard.as_array().unwrap().len(), 1, "{heard}");
        assert_eq!(heard[0]["command"], command, "{heard}");
    }
    let unknown = form(&server, "/workers/start", "queue=nobodys&count=1").await;
    assert_eq!(unknown.status, 422, "{unknown:?}");
    server.end().await;
}

#[tokio::test]
async fn workers_are_also_those_that_only_took_jobs() {
    let server = Server::start().await;
    server.post("/queues/mail/take", json!({"worker": "berta", "capacity": 3})).await;
    let page = server.get("/workers").await.body;
    assert!(page.contains("berta"), "{page}");
    server.end().await;
}
