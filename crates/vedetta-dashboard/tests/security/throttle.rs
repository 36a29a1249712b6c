//! Guessing passwords.

use vedetta_access::Role;

use crate::Guarded;

#[tokio::test]
async fn after_five_wrong_tries_there_is_a_wait_and_it_is_the_same_for_unknown_names() {
    for name in ["anna", "nobody"] {
        let guarded = Guarded::start().await;
        guarded.user("anna", Role::Viewer).await;
        let mut answers = Vec::new();
        for _ in 0..5 {
            let answer = guarded.try_to_sign_in(name, "wrong password").await;
            assert_eq!(answer.status, 401, "{answer:?}");
            answers.push(answer.body.replace(&crate::csrf_of(&answer.body), "TOKEN"));
        }
        assert!(answers.iter().all(|body| body.contains("The name or the password is wrong.")));
        answers.dedup();
        assert_eq!(answers.len(), 1, "each is the same");
        // Now even the right one has to wait.
        let held = guarded.try_to_sign_in("anna", crate::PASSWORD).await;
        assert_eq!(held.status, 429, "{held:?}");
        let wait = held.head.split("retry-after: ").nth(1).unwrap().lines().next().unwrap();
        assert!((1..=61).contains(&wait.parse::<u64>().unwrap()), "{wait}");
        // Who is in stays in.
        let token = guarded.token("t", Role::Viewer);
        assert_eq!(guarded.asks("GET /api/v1/jobs", &token).await.status, 200);
        guarded.end().await;
    }
}

#[tokio::test]
async fn who_signs_in_rightly_is_not_counted() {
    let guarded = Guarded::start().await;
    guarded.user("anna", Role::Viewer).await;
    for _ in 0..8 {
        guarded.sign_in("anna").await;
    }
    guarded.end().await;
}

#[tokio::test]
async fn a_form_is_short_however_its_token_comes() {
    let guarded = Guarded::start().await;
    // No byte of it is at the end of a name that may be.
    let name = format!("{}{}", "x".repeat(63), "%C3%A4".repeat(20_000));
    let form = guarded.form().await;
    let headers = [
        ("Cookie", form.cookie.as_str()),
        ("Content-Type", "application/x-www-form-urlencoded"),
        ("X-Vedetta-CSRF", form.csrf.as_str()),
    ];
    for (size, status) in [(1 << 10, 401), (100 << 10, 413)] {
        let body = format!("password=x&name={}", &name[..size]);
        let in_head = guarded.server.send("POST /login", &headers, &body).await;
        assert_eq!(in_head.status, status, "{size}: {in_head:?}");
        let in_body = guarded.post(&form, "/login", &body).await;
        assert_eq!(in_body.status, status, "{size}: {in_body:?}");
    }
    guarded.end().await;
}

#[tokio::test]
async fn many_who_sign_in_at_once_do_not_keep_others_from_being_served() {
    let guarded = Guarded::start().await;
    guarded.user("anna", Role::Viewer).await;
    let token = guarded.token("t", Role::Viewer);
    let flood = async {
        let tries = (0..24).map(|_| guarded.try_to_sign_in("anna", "wrong password"));
        let all = futures_util::future::join_all(tries).await;
        let mut statuses: Vec<u16> = all.iter().map(|answer| answer.status).collect();
        statuses.sort_unstable();
        statuses
    };
    let others = async {
        for _ in 0..50 {
            assert_eq!(guarded.asks("GET /api/v1/jobs", &token).await.status, 200);
        }
    };
    let (statuses, ()) = tokio::join!(flood, others);
    let expected: Vec<u16> = [401; 5].into_iter().chain([429; 19]).collect();
    assert_eq!(statuses, expected);
    guarded.end().await;
}
