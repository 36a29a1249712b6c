//! Users, tokens, sessions and the log, in a real file.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::time::{Duration, SystemTime};

use tempfile::TempDir;
use vedetta_access::{
    Access, AccessError, Area, Entry, FILE, Gathered, Outcome, Proof, Role, Scope, Secret,
};

const PASSWORD: &str = "correct horse";
const MINUTE: Duration = Duration::from_secs(60);
const HOUR: Duration = Duration::from_secs(3600);

fn open() -> (TempDir, Access) {
    let folder = tempfile::tempdir().unwrap();
    let access = Access::open(folder.path()).unwrap();
    (folder, access)
}

/// Signs in; the id of the session.
fn sign_in(access: &Access, name: &str, now: SystemTime) -> Option<Secret> {
    let session = access.sign_in(name, PASSWORD, None, "127.0.0.1", now).unwrap();
    session.map(|session| session.id)
}

fn contains(folder: &Path, text: &str) -> bool {
    let files = fs::read_dir(folder).unwrap().map(|file| fs::read(file.unwrap().path()).unwrap());
    files.into_iter().any(|bytes| bytes.windows(text.len()).any(|part| part == text.as_bytes()))
}

#[test]
fn a_user_signs_in_with_the_password_and_nothing_else() {
    let (folder, access) = open();
    let now = SystemTime::now();
    access.add_user("anna", PASSWORD, Role::Operator).unwrap();
    let try_with = |name: &str, password: &str| {
        access.sign_in(name, password, None, "::1", now).unwrap().is_some()
    };
    assert!(try_with("anna", PASSWORD));
    for (name, password) in [
        ("anna", ""),
        ("anna", "correct horse "),
        ("Anna", PASSWORD),
        ("anna ", PASSWORD),
        ("bert", PASSWORD),
        ("bert", "nobody"),
        ("", ""),
        ("anna' OR '1'='1", PASSWORD),
    ] {
        assert!(!try_with(name, password), "{name} {password}");
    }
    let session = access.sign_in("anna", PASSWORD, None, "::1", now).unwrap().unwrap();
    let identity = access.by_session(session.id.reveal(), now).unwrap().unwrap();
    assert_eq!(
        (identity.name.as_str(), identity.role, identity.proof),
        ("anna", Role::Operator, Proof::Session)
    );
    assert_eq!(format!("{session:?}").find(session.id.reveal()), None, "it does not show itself");
    drop(access);
    assert!(!contains(folder.path(), PASSWORD));
    assert!(!contains(folder.path(), session.id.reveal()));
    assert!(contains(folder.path(), "$argon2id$v=19$m=19456,t=2,p=1$"));
}

#[test]
fn names_and_passwords_are_checked() {
    let (_folder, access) = open();
    access.add_user("anna", PASSWORD, Role::Viewer).unwrap();
    for name in ["", "an na", "anna\n", "ännä", "a/b", &"a".repeat(65)] {
        let refused = access.add_user(name, PASSWORD, Role::Viewer);
        assert!(matches!(refused, Err(AccessError::Invalid(_))), "{name}");
    }
    for password in ["", "short", &"x".repeat(1025)] {
        let refused = access.add_user("bert", password, Role::Viewer);
        assert!(matches!(refused, Err(AccessError::Invalid(_))), "{password}");
    }
    let twice = access.add_user("anna", PASSWORD, Role::Viewer);
    assert!(matches!(twice, Err(AccessError::Exists("user", _))));
    assert!(matches!(access.remove_user("bert"), Err(AccessError::NoSuch("user", _))));
    assert!(matches!(access.revoke_token("bert"), Err(AccessError::NoSuch("token", _))));
    assert_eq!(access.users().unwrap().len(), 1);
}

#[test]
fn a_session_ends_when_it_is_idle_old_or_signed_out() {
    let (_folder, access) = open();
    access.add_user("anna", PASSWORD, Role::Viewer).unwrap();
    let start = SystemTime::now();
    let lives = |id: &Secret, at: SystemTime| access.by_session(id.reveal(), at).unwrap().is_some();

    let idle = sign_in(&access, "anna", start).unwrap();
    assert!(lives(&idle, start + 8 * HOUR - MINUTE));
    assert!(lives(&idle, start + 16 * HOUR - 2 * MINUTE), "it was used meanwhile");
    assert!(!lives(&idle, start + 24 * HOUR), "it was not for eight hours");

    let listening = sign_in(&access, "anna", start).unwrap();
    let listens =
        |at: SystemTime| access.by_idle_session(listening.reveal(), at).unwrap().is_some();
    assert!(listens(start + 8 * HOUR - MINUTE));
    assert!(!listens(start + 8 * HOUR), "to listen is no use of it");

    let used = sign_in(&access, "anna", start).unwrap();
    for hour in 1..24 {
        assert!(lives(&used, start + hour * HOUR), "{hour}");
    }
    assert!(!lives(&used, start + 24 * HOUR), "a day is enough");

    let left = sign_in(&access, "anna", start).unwrap();
    access.sign_out(left.reveal(), "::1", start).unwrap();
    assert!(!lives(&left, start));
    assert!(lives(&used, start), "others go on");
}

#[test]
fn nobody_waits_for_who_writes_to_be_known() {
    let (folder, access) = open();
    access.add_user("anna", PASSWORD, Role::Viewer).unwrap();
    let now = SystemTime::now();
    let session = sign_in(&access, "anna", now).unwrap();
    let token = access.add_token("ci", Role::Viewer, &Scope::All, None).unwrap();
    let lent = access.lend("worker", Role::Operator).unwrap();
    // As another process does, for as long as it likes.
    let other = rusqlite::Connection::open(folder.path().join(FILE)).unwrap();
    other.execute_batch("BEGIN IMMEDIATE").unwrap();
    // That they were there is news.
    let (later, began) = (now + 2 * MINUTE, std::time::Instant::now());
    assert!(access.by_session(session.reveal(), later).unwrap().is_some());
    for token in [&token, &lent] {
        assert!(access.by_token(token.reveal(), later).unwrap().is_some());
    }
    assert!(began.elapsed() < Duration::from_secs(4), "{:?}", began.elapsed());
    other.execute_batch("ROLLBACK").unwrap();
    assert_eq!(access.tokens().unwrap()[0].used, None);
    assert!(access.by_token(token.reveal(), later).unwrap().is_some());
    assert!(access.tokens().unwrap()[0].used.is_some(), "it is noted when it can be");
}

#[test]
fn a_sign_in_makes_a_new_session_and_ends_the_old_one() {
    let (_folder, access) = open();
    access.add_user("anna", PASSWORD, Role::Viewer).unwrap();
    let now = SystemTime::now();
    let first = sign_in(&access, "anna", now).unwrap();
    let again = access.sign_in("anna", PASSWORD, Some(first.reveal()), "::1", now).unwrap();
    let second = again.unwrap().id;
    assert_ne!(first.reveal(), second.reveal());
    assert_eq!(access.by_session(first.reveal(), now).unwrap(), None);
    assert!(access.by_session(second.reveal(), now).unwrap().is_some());
    // However often somebody signs in, the sessions are bounded.
    for _ in 0..40 {
        sign_in(&access, "anna", now + MINUTE).unwrap();
    }
    assert_eq!(access.by_session(second.reveal(), now + MINUTE).unwrap(), None);
}

#[test]
fn whoever_changes_a_user_ends_their_sessions_at_once() {
    type Change = fn(&Access) -> Result<(), AccessError>;
    let changes: [(&str, Change); 4] = [
        ("a role", |access| access.set_role("anna", Role::Admin)),
        ("a password", |access| access.set_password("anna", "another horse")),
        ("disabled", |access| access.set_disabled("anna", true)),
        ("removed", |access| access.remove_user("anna")),
    ];
    for (what, change) in changes {
        let (folder, access) = open();
        let now = SystemTime::now();
        access.add_user("anna", PASSWORD, Role::Viewer).unwrap();
        access.add_user("bert", PASSWORD, Role::Viewer).unwrap();
        let (hers, his) = (sign_in(&access, "anna", now), sign_in(&access, "bert", now));
        let (hers, his) = (hers.unwrap(), his.unwrap());
        assert!(access.by_session(hers.reveal(), now).unwrap().is_some());
        // As another process would.
        change(&Access::open(folder.path()).unwrap()).unwrap();
        assert_eq!(access.by_session(hers.reveal(), now).unwrap(), None, "{what}");
        assert!(access.by_session(his.reveal(), now).unwrap().is_some(), "{what}");
        let again = sign_in(&access, "anna", now);
        assert_eq!(again.is_some(), what == "a role", "{what}");
    }
}

#[test]
fn a_token_is_good_until_it_expires_or_is_revoked() {
    let (folder, access) = open();
    let now = SystemTime::now();
    let for_ever = access.add_token("ci", Role::Operator, &Scope::All, None).unwrap();
    let for_an_hour =
        access.add_token("short", Role::Viewer, &Scope::All, Some(now + HOUR)).unwrap();
    let of = |token: &Secret, at| {
        access.by_token(token.reveal(), at).unwrap().map(|identity| (identity.name, identity.role))
    };
    let far = now + 1000 * 24 * HOUR;
    assert_eq!(of(&for_ever, far), Some(("ci".into(), Role::Operator)));
    assert_eq!(of(&for_an_hour, now), Some(("short".into(), Role::Viewer)));
    assert_eq!(of(&for_an_hour, now + HOUR), None);
    assert_eq!(access.by_session(for_ever.reveal(), now).unwrap(), None, "it is no session");
    assert_eq!(access.by_token("vdt_", now).unwrap(), None);
    assert_eq!(access.by_token(&"x".repeat(1 << 20), now).unwrap(), None);
    assert!(access.tokens().unwrap()[0].used.is_some());

    Access::open(folder.path()).unwrap().revoke_token("ci").unwrap();
    assert_eq!(of(&for_ever, now), None, "at once, whoever revoked it");
    drop(access);
    assert!(for_ever.reveal().len() > 43);
    assert!(!contains(folder.path(), for_ever.reveal()));
}

#[test]
fn a_token_is_good_where_its_scope_says_and_everywhere_without_one() {
    let (folder, access) = open();
    let now = SystemTime::now();
    let some: Scope = "jobs,workers".parse().unwrap();
    let only = access.add_token("worker", Role::Operator, &some, None).unwrap();
    let all = access.add_token("ci", Role::Operator, &Scope::All, None).unwrap();
    let scope = |access: &Access, token: &Secret| {
        access.by_token(token.reveal(), now).unwrap().unwrap().scope
    };
    assert_eq!(scope(&access, &only), some);
    assert_eq!(scope(&access, &all), Scope::All);
    let listed: Vec<_> = access.tokens().unwrap().into_iter().map(|one| one.scope).collect();
    assert_eq!(listed, [Scope::All, some]);
    let log = access.audit(None, 2).unwrap();
    assert_eq!(log[1].target, "worker as operator for jobs,workers");
    assert_eq!(log[0].target, "ci as operator");
    // As the program does, in another process.
    let elsewhere = Access::open(folder.path()).unwrap();
    elsewhere.set_scope("worker", &Scope::Only([Area::Jobs].into())).unwrap();
    assert_eq!(scope(&access, &only), Scope::Only([Area::Jobs].into()), "at once");
    let nobody = elsewhere.set_scope("nobody", &Scope::All);
    assert!(matches!(nobody, Err(AccessError::NoSuch("token", _))));
    // Whoever signed in, and what a server started, is held by the role alone.
    access.add_user("anna", PASSWORD, Role::Viewer).unwrap();
    let anna = sign_in(&access, "anna", now).unwrap();
    assert_eq!(access.by_session(anna.reveal(), now).unwrap().unwrap().scope, Scope::All);
    let lent = access.lend("commands", Role::Operator).unwrap();
    assert_eq!(scope(&access, &lent), Scope::All);
    // What a later program wrote is not taken for more than it may be.
    let file = rusqlite::Connection::open(folder.path().join(FILE)).unwrap();
    file.execute("UPDATE token SET scope = 'jobs,moon' WHERE name = 'worker'", []).unwrap();
    let unknown = Scope::Unknown("jobs,moon".into());
    assert!(Area::ALL.into_iter().all(|area| !unknown.has(area)));
    assert_eq!(scope(&access, &only), unknown);
    // And keeps nobody from seeing the others.
    let listed: Vec<_> = access.tokens().unwrap().into_iter().map(|one| one.scope).collect();
    assert_eq!(listed, [Scope::All, unknown]);
    assert_eq!((listed[1].to_string().as_str(), listed[1].words()), ("jobs,moon", vec![]));
    access.set_scope("worker", &"jobs".parse().unwrap()).unwrap();
    assert_eq!(scope(&access, &only), Scope::Only([Area::Jobs].into()));
}

#[test]
fn tokens_from_before_there_were_scopes_stay_good_everywhere() {
    let (folder, access) = open();
    let old = access.add_token("old", Role::Admin, &Scope::All, None).unwrap();
    drop(access);
    let file = rusqlite::Connection::open(folder.path().join(FILE)).unwrap();
    file.execute_batch("ALTER TABLE token DROP COLUMN scope; PRAGMA user_version = 2").unwrap();
    drop(file);
    let access = Access::open(folder.path()).unwrap();
    let found = access.by_token(old.reveal(), SystemTime::now()).unwrap().unwrap();
    assert_eq!((found.name.as_str(), found.role, found.scope), ("old", Role::Admin, Scope::All));
}

#[test]
fn a_lent_token_ends_with_its_process() {
    let (folder, access) = open();
    let lent = access.lend("commands", Role::Operator).unwrap();
    let now = SystemTime::now();
    assert_eq!(access.by_token(lent.reveal(), now).unwrap().unwrap().role, Role::Operator);
    let another = Access::open(folder.path()).unwrap();
    assert_eq!(another.by_token(lent.reveal(), now).unwrap(), None);
    assert!(another.tokens().unwrap().is_empty());
    assert!(!contains(folder.path(), lent.reveal()));
    access.take_back().unwrap();
    assert_eq!(access.by_token(lent.reveal(), now).unwrap(), None);
    another.lend("commands", Role::Operator).unwrap();
    assert_eq!(another.by_token(lent.reveal(), now).unwrap(), None);
}

#[test]
fn a_token_that_a_killed_process_lent_stays_good_while_it_is_used_with_no_higher_role() {
    let (folder, first) = open();
    let lent = first.lend("commands", Role::Admin).unwrap();
    drop(first);
    let now = SystemTime::now();
    let next = Access::open(folder.path()).unwrap();
    next.lend("commands", Role::Operator).unwrap();
    let found = next.by_token(lent.reveal(), now).unwrap().unwrap();
    assert_eq!((found.name.as_str(), found.role), ("commands", Role::Operator));
    // It is used in the hours that follow, but not in those after them: by then nobody has it.
    assert!(next.by_token(lent.reveal(), now + HOUR).unwrap().is_some());
    let file = rusqlite::Connection::open(folder.path().join(FILE)).unwrap();
    let used = |ago: Duration| {
        let at = (now - ago).duration_since(SystemTime::UNIX_EPOCH).unwrap().as_millis();
        file.execute("UPDATE lent SET used = ?1", [i64::try_from(at).unwrap()]).unwrap();
    };
    for (ago, is_good) in [(HOUR / 2, true), (2 * HOUR, false)] {
        used(ago);
        let next = Access::open(folder.path()).unwrap();
        next.lend("commands", Role::Operator).unwrap();
        assert_eq!(next.by_token(lent.reveal(), now).unwrap().is_some(), is_good, "{ago:?}");
    }
}

#[test]
fn the_file_is_private_and_nobody_elses() {
    let (folder, access) = open();
    access.add_user("anna", PASSWORD, Role::Viewer).unwrap();
    for file in fs::read_dir(folder.path()).unwrap() {
        let file = file.unwrap();
        assert_eq!(file.metadata().unwrap().permissions().mode() & 0o777, 0o600, "{file:?}");
    }
    drop(access);
    let file = folder.path().join(FILE);
    fs::set_permissions(&file, fs::Permissions::from_mode(0o644)).unwrap();
    assert!(matches!(Access::open(folder.path()), Err(AccessError::Loose(_))));
    fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();

    let sql = |text| rusqlite::Connection::open(&file).unwrap().execute_batch(text).unwrap();
    sql("PRAGMA user_version = 99");
    assert!(matches!(Access::open(folder.path()), Err(AccessError::Newer(_))));
    sql("PRAGMA application_id = 7");
    assert!(matches!(Access::open(folder.path()), Err(AccessError::Foreign(_))));
}

#[test]
fn whether_there_is_anybody_is_known_without_making_anything() {
    let folder = tempfile::tempdir().unwrap();
    let inside = folder.path().join("data");
    assert!(!Access::has_anybody(&inside).unwrap());
    assert!(!inside.exists());
    let access = Access::open(&inside).unwrap();
    assert!(!Access::has_anybody(&inside).unwrap());
    access.add_user("anna", PASSWORD, Role::Viewer).unwrap();
    assert!(Access::has_anybody(&inside).unwrap());
    access.set_disabled("anna", true).unwrap();
    assert!(!Access::has_anybody(&inside).unwrap());
    access.add_token("old", Role::Admin, &Scope::All, Some(SystemTime::now() - HOUR)).unwrap();
    assert!(!Access::has_anybody(&inside).unwrap(), "it has expired");
    access.add_token("ci", Role::Admin, &Scope::All, None).unwrap();
    assert!(Access::has_anybody(&inside).unwrap());
}

fn entry(action: &str) -> Entry {
    Entry {
        who: "anna".into(),
        source: "::1".into(),
        action: action.into(),
        target: String::new(),
        outcome: Outcome::Done,
    }
}

#[test]
fn the_log_tells_who_did_what_in_pages_and_forgets_the_oldest() {
    let (_folder, access) = open();
    let now = SystemTime::now();
    access.add_user("anna", PASSWORD, Role::Viewer).unwrap();
    assert!(sign_in(&access, "anna", now).is_some());
    access.sign_in("anna", "wrong password", None, "192.0.2.7", now).unwrap();
    access.sign_in("hunter2 oops", "x", None, "192.0.2.7", now).unwrap();
    let told: Vec<_> = access.audit(None, 10).unwrap();
    let told: Vec<_> = told
        .iter()
        .rev()
        .map(|one| (one.who.as_str(), one.action.as_str(), one.outcome.as_str()))
        .collect();
    let expected = [
        ("shell", "user add", "done"),
        ("anna", "sign-in", "done"),
        ("anna", "sign-in", "refused"),
        ("?", "sign-in", "refused"), // what was typed may be a password
    ];
    assert_eq!(told, expected);

    let page = access.audit(None, 3).unwrap();
    let rest = access.audit(Some(page[2].id), 3).unwrap();
    assert_eq!((page.len(), rest.len()), (3, 1));

    let strange = Entry { target: "a\r\nb\u{1b}".into(), ..entry("put") };
    let long = Entry { target: "ä".repeat(4000), ..entry("put") };
    access.record(&[(strange, 1), (long, 7)], now).unwrap();
    let page = access.audit(None, 2).unwrap();
    assert_eq!(page[1].target, "a\\u{d}\\u{a}b\\u{1b}");
    assert!(page[0].target.len() < 600 && page[0].count == 7);

    let many: Vec<_> = (0..101_000).map(|n| (entry(&n.to_string()), 1)).collect();
    access.record(&many, now).unwrap();
    access.record(&[(entry("last"), 1)], now + 100 * 24 * HOUR).unwrap();
    let left = access.audit(None, 200_000).unwrap();
    assert!(left.len() <= 100_256, "bounded by number: {}", left.len());
    let many: Vec<_> = (0..256).map(|_| (entry("late"), 1)).collect();
    access.record(&many, now + 100 * 24 * HOUR).unwrap();
    let left = access.audit(None, 200_000).unwrap();
    assert_eq!(left.len(), 257, "bounded by age");
}

#[test]
fn what_happens_again_and_again_is_counted() {
    let mut gathered = Gathered::default();
    assert_eq!(gathered.add(entry("a")), [(entry("a"), 1)]);
    for _ in 0..999 {
        assert_eq!(gathered.add(entry("a")), []);
    }
    assert_eq!(gathered.add(entry("b")), [(entry("b"), 1)]);
    assert_eq!(gathered.flush(), [(entry("a"), 999)]);
    assert_eq!(gathered.flush(), []);
    assert_eq!(gathered.add(entry("a")), [(entry("a"), 1)]);
    // Nobody makes it remember more and more.
    let written: usize = (0..5000).map(|n| gathered.add(entry(&format!("{n}"))).len()).sum();
    assert_eq!(written, 5000);
}
