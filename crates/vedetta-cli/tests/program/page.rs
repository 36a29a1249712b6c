//! The pages of a real server in a real browser: people sign in, see worker processes and steer them as far as they
//! may, wherever the commands are kept.

use std::fs;
use std::net::SocketAddr;
use std::path::Path;

use serde_json::json;
use testing::browser::Browser;

use crate::access::{PASSWORD, token, typed};
use crate::handler::{add, alive, config, job, status};
use crate::support::{Server, http, temp, until};
use crate::worker::{
    ANY_PORT, Places, find, id, on_postgresql, over_redis, pid, supervised, until_running, up_with,
    with_status, workers,
};

/// People sign in; a job of the kind `print` fails for good until there is a file `ink`.
const PRINTS: &str = "
[auth]
enabled = true
[handler.print]
max-attempts = 1
run = ['sh', '-c', 'cat >/dev/null; test -e ink || { echo no ink >&2; exit 1; }']
";

#[test]
fn people_see_and_steer_workers_on_the_page_as_far_as_they_may_over_the_embedded_file() {
    people_see_and_steer_workers(&[]);
}

#[tokio::test]
async fn people_see_and_steer_workers_on_the_page_as_far_as_they_may_over_redis() {
    over_redis(people_see_and_steer_workers).await;
}

#[tokio::test]
async fn people_see_and_steer_workers_on_the_page_as_far_as_they_may_on_postgresql() {
    on_postgresql(people_see_and_steer_workers).await;
}

fn people_see_and_steer_workers(places: Places<'_>) {
    let folder = temp();
    let at = folder.path();
    for (name, role) in [("vera", "viewer"), ("otto", "operator")] {
        assert_eq!(typed(at, &["user", "add", name, "--role", role], PASSWORD).code, 0);
    }
    let (eyes, own) = (token(at, "eyes", "viewer"), token(at, "own", "operator"));
    config(at, &format!("{}{PRINTS}", supervised("min = 1\nmax = 3")));
    let server = up_with(at, ANY_PORT, places).signed_in(own);
    let worker = id(&until_running(&server, 1)[0]);
    a_viewers_token_only_reads(&server, &eyes, &worker);
    tokio::runtime::Runtime::new().unwrap().block_on(async {
        let visitor = Visitor { browser: Browser::open().await, server: &server };
        visitor.sign_in("vera", "/workers").await;
        a_viewer_sees_and_is_refused(&visitor, &worker).await;
        visitor.sign_out().await;
        visitor.sign_in("otto", "/workers").await;
        an_operator_steers_workers(&visitor, &worker).await;
        an_operator_holds_a_queue(&visitor).await;
        an_operator_retries_what_failed(&visitor, at).await;
        an_operator_ends_all_workers(&visitor).await;
    });
    server.stop();
}

fn a_viewers_token_only_reads(server: &Server, eyes: &str, worker: &str) {
    let agent = ureq::Agent::config_builder().proxy(None).http_status_as_error(false);
    let agent = agent.build().new_agent();
    let url = format!("{}/api/v1/workers", server.url);
    let bearer = format!("Bearer {eyes}");
    let seen = http().get(&url).header("Authorization", &bearer).call().unwrap();
    assert_eq!(seen.status(), 200);
    for path in ["/terminate", &format!("/{worker}/pause"), &format!("/{worker}/stop"), ""] {
        let post = || agent.post(format!("{url}{path}"));
        let body = json!({"queue": "default"});
        let refused = post().header("Authorization", &bearer).send_json(&body).unwrap();
        assert_eq!(refused.status(), 403, "{path}");
        assert_eq!(post().send_json(&body).unwrap().status(), 401, "{path}");
    }
    assert_eq!(find(server, worker)["status"], "running");
}

/// Somebody at a browser.
struct Visitor<'a> {
    browser: Browser,
    server: &'a Server,
}

impl Visitor<'_> {
    fn address(&self) -> SocketAddr {
        self.server.url.trim_start_matches("http://").parse().unwrap()
    }

    async fn open(&self, path: &str) {
        self.browser.live(self.address(), path).await;
    }

    /// Wants to see a page, and has to sign in first.
    async fn sign_in(&self, name: &str, path: &str) {
        self.browser.goto(self.address(), path).await;
        assert_eq!(self.path().await, "/login");
        for (field, text) in [("name", name), ("password", PASSWORD)] {
            let field = self.browser.find(&format!("input[name={field}]")).await;
            field.send_keys(text).await.unwrap();
        }
        self.browser.click("form button").await;
        self.browser.find("#line[data-state=live]").await;
        assert_eq!(self.path().await, path);
    }

    async fn sign_out(&self) {
        self.browser.click("form.sign-out button").await;
        self.browser.find("input[name=password]").await;
    }

    async fn path(&self) -> String {
        self.browser.client.current_url().await.unwrap().path().to_owned()
    }

    /// Presses a button, after it is shown.
    async fn press(&self, row: &str, what: &str) {
        self.browser.click(&format!("{row} form[action$='/{what}'] button")).await;
    }

    /// The same with a button that asks first.
    async fn press_twice(&self, row: &str, what: &str) {
        self.browser.click(&format!("{row} .careful summary")).await;
        self.press(row, what).await;
    }

    async fn sees(&self, row: &str, state: &str) {
        self.browser.says(&format!("{row} .badge"), state).await;
    }

    /// Nothing was complained of but that requests were refused.
    fn was_only_refused(&self) {
        let complaints = self.browser.complaints();
        assert!(!complaints.is_empty(), "a browser tells of what is refused");
        assert!(complaints.iter().all(|line| line.contains("403")), "{complaints:?}");
    }
}

fn row_of(worker: &str) -> String {
    format!("tr[data-worker='{worker}']")
}

async fn a_viewer_sees_and_is_refused(vera: &Visitor<'_>, worker: &str) {
    let row = row_of(worker);
    vera.sees(&row, "running").await;
    vera.sees("#supervisors tr", "running").await;
    let process = pid(&find(vera.server, worker));
    vera.browser.says(&format!("{row} [data-f=process]"), &process).await;
    vera.press(&row, "pause").await;
    vera.browser.says("#outcome", "this needs the role operator").await;
    vera.open("/workers").await; // without the answer
    vera.press("#kept", "start").await;
    vera.browser.says("#outcome", "this needs the role operator").await;
    vera.was_only_refused();
    let now = workers(vera.server);
    assert_eq!(now.len(), 1, "nobody was started: {now:?}");
    assert_eq!(now[0]["status"], "running");
}

async fn an_operator_steers_workers(otto: &Visitor<'_>, first: &str) {
    // A request that did not come from the page's own form is not obeyed, whoever is signed in.
    let script = "const [done] = arguments;
        fetch('/api/v1/workers/terminate', { method: 'POST' }).then(({ status }) => done(status))";
    let status_of = otto.browser.client.execute_async(script, Vec::new()).await.unwrap();
    assert_eq!(status_of, 403);
    otto.was_only_refused();

    otto.press("#kept", "start").await;
    otto.browser.says("#outcome", "1 worker was asked for.").await;
    let two = until_running(otto.server, 2);
    let second = id(two.iter().find(|worker| worker["id"] != first).unwrap());
    for worker in [first, &second] {
        otto.sees(&row_of(worker), "running").await;
        otto.press(&row_of(worker), "pause").await;
        otto.sees(&row_of(worker), "paused").await;
    }
    assert_eq!(with_status(otto.server, "paused").len(), 2);
    let waits = add(otto.server, "quick", "null");
    otto.press(&row_of(first), "resume").await;
    otto.sees(&row_of(first), "running").await;
    until("the job", || status(otto.server, &waits) == "done");
    assert_eq!(job(otto.server, &["show", &waits])["worker"], first, "the other is paused");

    let process = pid(&find(otto.server, &second));
    otto.press_twice(&row_of(&second), "stop").await;
    otto.sees(&row_of(&second), "stopped").await;
    until("the end of the process", || !alive(&process));
    assert_eq!(find(otto.server, &second)["status"], "stopped");
    assert_eq!(otto.browser.complaints(), [""; 0]);
}

async fn an_operator_holds_a_queue(otto: &Visitor<'_>) {
    let row = "tr[data-queue=default]";
    otto.open("/queues").await;
    otto.press(row, "pause").await;
    otto.sees(row, "paused").await;
    let waits = add(otto.server, "quick", "null");
    otto.browser.says(&format!("{row} [data-f=ready]"), "1").await;
    assert_eq!(status(otto.server, &waits), "waiting");
    otto.press(row, "resume").await;
    otto.sees(row, "open").await;
    until("the job", || status(otto.server, &waits) == "done");
}

async fn an_operator_retries_what_failed(otto: &Visitor<'_>, folder: &Path) {
    let print = add(otto.server, "print", "null");
    until("its end", || status(otto.server, &print) == "dead");
    is_counted(otto, "1 failed").await;
    let row = &format!("tr[data-job='{print}']");
    otto.open("/failed").await;
    otto.browser.says(row, "no ink").await;
    fs::write(folder.join("ink"), "").unwrap();
    otto.press(row, "retry").await;
    otto.browser.says("#outcome", &format!("Job {print} is to be tried again.")).await;
    otto.sees(row, "done").await;
    otto.open("/jobs?status=done&q=print").await;
    otto.browser.click(&format!("{row} a[data-f=id]")).await;
    otto.sees("#job", "done").await;
    otto.open("/").await;
    otto.browser.says("#news", "print").await;
    is_counted(otto, "3 done and 1 failed").await;
    assert_eq!(otto.browser.complaints(), [""; 0]);
}

/// Where others may settle jobs, too, they are counted a little later.
async fn is_counted(otto: &Visitor<'_>, ends: &str) {
    testing::soon("all is counted", async {
        loop {
            otto.open("/insights").await;
            if otto.browser.find("main").await.text().await.unwrap().contains(ends) {
                break;
            }
        }
    })
    .await;
}

async fn an_operator_ends_all_workers(otto: &Visitor<'_>) {
    otto.open("/workers").await;
    otto.press_twice("#kept", "terminate").await;
    until("the end of all workers", || workers(otto.server).is_empty());
    otto.sees("#supervisors tr", "terminated").await;
}
