//! `vedetta user`, `vedetta token`, and a server that people sign in to.

use std::fs;
use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::support::{Ran, Running, Server, http, run, temp, until, vedetta};

pub(crate) const PASSWORD: &str = "correct horse";

fn config(folder: &Path, text: &str) {
    fs::write(folder.join("vedetta.toml"), text).unwrap();
}

/// Runs a command with a line on stdin.
pub(crate) fn typed(folder: &Path, args: &[&str], line: &str) -> Ran {
    let mut command = vedetta(folder);
    let command = command.args(args).stdin(Stdio::piped());
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // It may refuse before it reads.
    let _ = writeln!(child.stdin.take().unwrap(), "{line}");
    child.wait_with_output().unwrap().into()
}

/// A new token.
pub(crate) fn token(folder: &Path, name: &str, role: &str) -> String {
    let made = run(folder, &["token", "add", name, "--role", role]);
    assert_eq!(made.code, 0, "{made:?}");
    made.out.trim().to_owned()
}

fn with_token(server: &Server, token: &str, args: &[&str]) -> Ran {
    server.command(args).env("VEDETTA_TOKEN", token).output().unwrap().into()
}

#[test]
fn users_and_tokens_are_made_before_and_while_a_server_runs() {
    let folder = temp();
    let at = folder.path();
    let added = typed(at, &["user", "add", "anna", "--role", "admin"], PASSWORD);
    assert_eq!((added.code, added.out.as_str()), (0, "anna was added\n"), "{added:?}");
    config(at, "[auth]\nenabled = true");
    let server = Server::start(at);

    let nobody = server.kv(&["get", "k"]);
    assert_eq!(nobody.code, 1, "{nobody:?}");
    assert!(
        nobody.err.contains("sign in first") && nobody.err.contains("VEDETTA_TOKEN"),
        "{nobody:?}"
    );
    assert_eq!(nobody.err.lines().count(), 1, "{nobody:?}");

    let (viewer, admin) = (token(at, "eyes", "viewer"), token(at, "ci", "admin"));
    let refused = with_token(&server, &viewer, &["kv", "put", "k", "v"]);
    assert_eq!(refused.code, 1, "{refused:?}");
    assert!(refused.err.contains("this needs the role admin"), "{refused:?}");
    assert_eq!(with_token(&server, &admin, &["kv", "put", "k", "v"]).code, 0);
    assert_eq!(with_token(&server, &viewer, &["kv", "get", "k"]).out, "v\n");

    let tokens = run(at, &["token", "list", "--output", "json"]).json();
    assert_eq!(tokens["tokens"][1]["name"], "eyes", "{tokens}");
    let users = run(at, &["user", "list", "--output", "json"]).json();
    for time in [&tokens["tokens"][1]["used"], &users["users"][0]["created"]] {
        let time = time.as_str().unwrap_or_else(|| panic!("{time} is no text"));
        let form: String = time.chars().map(|c| if c.is_ascii_digit() { '0' } else { c }).collect();
        assert_eq!(form, "0000-00-00T00:00:00.000Z", "as all times are");
    }
    assert!(!tokens.to_string().contains(&viewer), "it is shown once");
    assert_eq!(run(at, &["token", "revoke", "eyes"]).code, 0);
    let revoked = with_token(&server, &viewer, &["kv", "get", "k"]);
    assert_eq!(revoked.code, 1, "{revoked:?}");
    assert!(revoked.err.contains("no longer good"), "{revoked:?}");

    // What was done is in the log.
    let mut answer = http()
        .get(format!("{}/api/v1/audit", server.url))
        .header("Authorization", format!("Bearer {admin}"))
        .call()
        .unwrap();
    let log: Value = answer.body_mut().read_json().unwrap();
    let told = log.to_string();
    for action in ["user add", "token add", "token revoke", "PUT /api/v1/kv/{*key}"] {
        assert!(told.contains(action), "{action}: {told}");
    }
    server.stop();
}

#[test]
fn a_token_with_a_scope_is_made_listed_narrowed_and_refused_outside() {
    let folder = temp();
    let at = folder.path();
    config(at, "[auth]\nenabled = true");
    let server = Server::start(at);
    let made = run(at, &["token", "add", "ci", "--role", "operator", "--scope", "jobs,queues"]);
    assert_eq!(made.code, 0, "{made:?}");
    let ci = made.out.trim();
    token(at, "eyes", "viewer");
    assert_eq!(with_token(&server, ci, &["job", "add", "note"]).code, 0);
    assert_eq!(with_token(&server, ci, &["queue", "pause", "default"]).code, 0);
    let refused = with_token(&server, ci, &["worker", "list"]);
    assert_eq!(refused.code, 1, "{refused:?}");
    for sentence in ["this needs the scope workers", "token:ci has the scope jobs,queues"] {
        assert!(refused.err.contains(sentence), "{refused:?}");
    }
    let listed = run(at, &["token", "list"]).out;
    let words: Vec<Vec<&str>> =
        listed.lines().map(|line| line.split_whitespace().take(3).collect()).collect();
    let expected =
        [["NAME", "ROLE", "SCOPE"], ["ci", "operator", "jobs,queues"], ["eyes", "viewer", "all"]];
    assert_eq!(words, expected, "{listed}");
    let tokens = run(at, &["token", "list", "--output", "json"]).json();
    assert_eq!(tokens["tokens"][0]["scope"], serde_json::json!(["jobs", "queues"]), "{tokens}");
    assert_eq!(tokens["tokens"][1]["scope"], serde_json::json!(["all"]), "{tokens}");

    let narrowed = run(at, &["token", "scope", "ci", "queues"]);
    assert_eq!((narrowed.code, narrowed.out.as_str()), (0, "ci is good for queues\n"));
    assert_eq!(with_token(&server, ci, &["job", "list"]).code, 1);
    assert_eq!(with_token(&server, ci, &["queue", "list"]).code, 0);
    assert_eq!(run(at, &["token", "scope", "ci", "all"]).code, 0);
    assert_eq!(with_token(&server, ci, &["worker", "list"]).code, 0);
    server.stop();
}

#[test]
fn workers_of_a_supervisor_with_a_scoped_token_work_with_it() {
    let folder = temp();
    let at = folder.path();
    let scoped = |name: &str| {
        let args = ["token", "add", name, "--role", "operator", "--scope", "jobs,workers"];
        let made = run(at, &args);
        assert_eq!(made.code, 0, "{made:?}");
        made.out.trim().to_owned()
    };
    let (mine, theirs, here) = (scoped("mine"), scoped("elsewhere"), scoped("here"));
    let supervisor = |kind: &str| {
        format!(
            "[handler.{kind}]\nrun = ['true']\nqueue = '{kind}'\n\
             [supervisor.{kind}]\nqueues = ['{kind}']\nmin = 1\nmax = 1\n"
        )
    };
    let done_by = |server: &Server, kind: &str| {
        let add = ["job", "add", kind, "--queue", kind, "--wait", "--output", "json"];
        let done = with_token(server, &mine, &add);
        assert_eq!(done.code, 0, "{done:?}");
        done.json()["jobs"][0]["worker"].as_str().unwrap().to_owned()
    };
    config(at, &format!("[auth]\nenabled = true\n{}", supervisor("near")));
    // What `vedetta up` is given is what its workers are given.
    let mut up = vedetta(at);
    up.args(["up", "--http", "127.0.0.1:0"]).env("VEDETTA_TOKEN", &here);
    let server = Server::with(&mut up, at);
    assert!(done_by(&server, "near").starts_with("near-"));
    let there = temp();
    config(there.path(), &supervisor("far"));
    let mut supervise = vedetta(there.path());
    supervise.args(["supervise", "--server", &server.url]).env("VEDETTA_TOKEN", &theirs);
    let mut supervise = Running::start(&mut supervise);
    assert!(done_by(&server, "far").starts_with("far-"));
    supervise.signal("TERM");
    assert_eq!(supervise.wait().code(), Some(0));
    server.stop();
}

#[test]
fn what_cannot_be_done_to_users_and_tokens_ends_with_its_code() {
    let folder = temp();
    let at = folder.path();
    for args in [&["user", "list"][..], &["token", "revoke", "ci"]] {
        let ran = run(at, args);
        assert!(ran.code == 1 && ran.err.contains("check --data"), "{ran:?}");
    }
    assert!(!at.join("vedetta-data").exists(), "looking makes nothing");
    assert_eq!(typed(at, &["user", "add", "anna"], PASSWORD).code, 0);
    assert_eq!(run(at, &["token", "add", "ci"]).code, 0);
    for (args, line, code, sentence) in [
        (&["user", "add", "anna"][..], PASSWORD, 4, "there is a user \"anna\" already"),
        (&["user", "add", "a b"], PASSWORD, 2, "the name of a user is"),
        (&["user", "add", "bert"], "short", 2, "a password has 8 to 1024 bytes"),
        (&["user", "add", "bert", "--role", "king"], PASSWORD, 2, "is no role"),
        (&["user", "passwd", "bert"], PASSWORD, 3, "there is no user \"bert\""),
        (&["user", "role", "bert", "admin"], "", 3, "there is no user"),
        (&["user", "remove", "bert"], "", 3, "there is no user"),
        (&["token", "add", "ci"], "", 4, "there is a token \"ci\" already"),
        (&["token", "add", "x", "--expires", "soon"], "", 2, "soon"),
        (&["token", "revoke", "x"], "", 3, "there is no token \"x\""),
        (&["token", "add", "x", "--scope", "jobs,moon"], "", 2, "\"moon\" is no scope"),
        (&["token", "add", "x", "--scope", ""], "", 2, "is no scope"),
        (&["token", "scope", "x", "jobs"], "", 3, "there is no token \"x\""),
        (&["token", "scope", "ci"], "", 2, "SCOPE"),
    ] {
        let ran = typed(at, args, line);
        assert_eq!(ran.code, code, "{args:?}: {ran:?}");
        assert!(ran.err.contains(sentence), "{args:?}: {ran:?}");
        assert!(!ran.err.contains(PASSWORD), "{args:?}: {ran:?}");
    }
    for args in [&["role", "anna", "operator"][..], &["disable", "anna"], &["enable", "anna"]] {
        assert_eq!(run(at, &[&["user"], args].concat()).code, 0, "{args:?}");
    }
    let list = run(at, &["user", "list"]);
    assert!(list.out.contains("anna") && list.out.contains("operator"), "{list:?}");
    assert_eq!(run(at, &["user", "remove", "anna"]).code, 0);
    let users = run(at, &["user", "list", "--output", "json"]).json();
    assert_eq!(users["users"].as_array().unwrap().len(), 0);
}

/// A certificate for `localhost` in the folder.
fn certificate(folder: &Path) {
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    fs::write(folder.join("http.crt"), made.cert.pem()).unwrap();
    fs::write(folder.join("http.key"), made.signing_key.serialize_pem()).unwrap();
}

const BEYOND: &str = "--http=0.0.0.0:0";
const NAMED: &str = "hosts = ['localhost']\n";
const TLS: &str = "tls-cert = 'http.crt'\ntls-key = 'http.key'\n";

#[test]
fn beyond_loopback_it_starts_only_when_people_sign_in_over_tls() {
    let auth = "[auth]\nenabled = true\n";
    let tls = format!("[http]\n{TLS}{auth}");
    let insecure = format!("[http]\ninsecure = true\n{auth}");
    for (config_text, somebody, args, sentence) in [
        (String::new(), true, &[BEYOND][..], "set auth.enabled = true"),
        (format!("[http]\n{TLS}"), true, &[BEYOND], "set auth.enabled = true"),
        ("[http]\ninsecure = true".into(), true, &[BEYOND], "set auth.enabled = true"),
        (auth.into(), true, &[BEYOND], "set http.tls-cert and http.tls-key"),
        (tls.clone(), false, &[BEYOND], "add somebody first"),
        (insecure.clone(), false, &[BEYOND], "add somebody first"),
        (auth.into(), true, &["--http=[::]:0"], "set http.tls-cert"),
        (auth.into(), true, &["--http=[::ffff:192.0.2.1]:0"], "set http.tls-cert"),
        (
            "[http]\ntls-cert = 'http.crt'".into(),
            true,
            &[],
            "http.tls-cert is set and http.tls-key is not",
        ),
        ("[http]\nhosts = ['a:80']".into(), true, &[], "without a port"),
        // The other endpoint asks for certificates of its clients, whatever this one does.
        (tls.clone(), true, &["--etcd=0.0.0.0:0"], "set etcd.cert, etcd.key and etcd.client-ca"),
        (
            format!("{auth}[etcd]\ncert = 'http.crt'\nkey = 'http.key'"),
            true,
            &["--etcd=0.0.0.0:0"],
            "etcd.client-ca",
        ),
        (
            "[etcd]\nclient-ca = 'http.crt'".into(),
            true,
            &["--etcd=0.0.0.0:0"],
            "etcd.client-ca is set and etcd.cert is not",
        ),
    ] {
        let folder = temp();
        certificate(folder.path());
        if somebody {
            token(folder.path(), "ci", "viewer");
        }
        config(folder.path(), &config_text);
        let refused = run(folder.path(), &[&["up"], args].concat());
        assert_eq!(refused.code, 2, "{config_text} {args:?}: {refused:?}");
        assert!(refused.err.contains(sentence), "{config_text} {args:?}: {refused:?}");
        assert_eq!(refused.err.lines().count(), 1, "{refused:?}");
        assert!(!folder.path().join("vedetta-data/vedetta.db").exists(), "nothing was made");
    }
    for settings in [format!("[http]\n{NAMED}{TLS}{auth}"), insecure] {
        let folder = temp();
        certificate(folder.path());
        let token = token(folder.path(), "ci", "viewer");
        config(folder.path(), &settings);
        let server = Server::with(vedetta(folder.path()).args(["up", BEYOND]), folder.path());
        let url = server.url.clone();
        let get = |token: &str| -> Ran {
            let mut command = vedetta(folder.path());
            command.env("VEDETTA_SERVER", &url).env("VEDETTA_TOKEN", token);
            command.env("VEDETTA_CA", "http.crt").args(["queue", "list"]).output().unwrap().into()
        };
        let listed = get(&token);
        assert_eq!(listed.code, 0, "{url}: {listed:?}");
        assert_eq!(get("").code, 1);
        if url.starts_with("https") {
            let mut stranger = vedetta(folder.path());
            stranger.env("VEDETTA_SERVER", &url).args(["queue", "list"]);
            let refused = Ran::from(stranger.output().unwrap());
            assert_eq!(refused.code, 5, "a certificate that nobody vouches for: {refused:?}");
            assert!(refused.err.contains("cannot trust"), "{refused:?}");
        }
        server.stop();
    }
}

#[test]
fn beyond_loopback_its_own_workers_and_their_commands_reach_it() {
    let program = env!("CARGO_BIN_EXE_vedetta");
    for http in [format!("[http]\n{NAMED}{TLS}"), "[http]\ninsecure = true\n".to_owned()] {
        let folder = temp();
        let at = folder.path();
        certificate(at);
        let own = token(at, "mine", "operator");
        let command = format!("{program} job add other >told; echo $? >>told");
        let settings = format!(
            "{http}[auth]\nenabled = true\n[handler.note]\nrun = ['sh', '-c', '{command}']\n\
             [supervisor.default]\nqueues = ['*']\nmin = 1\nmax = 1\n"
        );
        config(at, &settings);
        let mut up = vedetta(at);
        let server = Server::with(up.args(["up", BEYOND]).env("VEDETTA_CA", "http.crt"), at);
        let mut add = server.command(&["job", "add", "note", "--wait", "--output", "json"]);
        add.env("VEDETTA_TOKEN", &own).env("VEDETTA_CA", "http.crt");
        let added = Ran::from(add.output().unwrap());
        assert_eq!(added.code, 0, "{http}: {added:?}");
        let done = added.json();
        assert_eq!(done["jobs"][0]["status"], "done", "{http}: {done}");
        let worker = done["jobs"][0]["worker"].as_str().unwrap();
        assert!(worker.starts_with("default-"), "a process of the supervisor: {done}");
        let told = fs::read_to_string(at.join("told")).unwrap();
        assert_eq!(told.lines().last(), Some("0"), "{http}: {told}");
        server.stop();
    }
}

#[test]
fn beyond_loopback_the_etcd_endpoint_lets_in_whom_its_authority_vouches_for() {
    use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};
    let folder = temp();
    let at = folder.path();
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    // With the name that all have by default, what it signs would look signed by itself.
    params.distinguished_name.push(DnType::CommonName, "authority");
    let authority = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
    fs::write(at.join("ca.crt"), authority.pem()).unwrap();
    for (name, file) in [("localhost", "etcd"), ("client", "client")] {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new([name.to_owned()]).unwrap();
        let signed = params.signed_by(&key, &authority).unwrap();
        fs::write(at.join(format!("{file}.crt")), signed.pem()).unwrap();
        fs::write(at.join(format!("{file}.key")), key.serialize_pem()).unwrap();
    }
    config(at, "[etcd]\ncert = 'etcd.crt'\nkey = 'etcd.key'\nclient-ca = 'ca.crt'\n");
    let up = ["up", "--http=127.0.0.1:0", "--etcd=0.0.0.0:0"];
    let server = Server::with(vedetta(at).args(up), at);
    let url = format!("{}/v2/keys/color", server.etcd.replace("0.0.0.0", "localhost"));
    assert!(url.starts_with("https://"), "{url}");
    let put = |args: &[&str]| -> Ran {
        let mut curl = Command::new("curl");
        curl.args(["-sS", "--noproxy", "*", "--cacert", "ca.crt", "-X", "PUT"]);
        curl.args(["-d", "value=blue", &url]).args(args).current_dir(at).output().unwrap().into()
    };
    let before = server.overview()["revision"].clone();
    let refused = put(&[]);
    assert!(refused.code != 0 && refused.out.is_empty(), "without a certificate: {refused:?}");
    assert_eq!(server.overview()["revision"], before, "nothing was written");
    let written = put(&["--cert", "client.crt", "--key", "client.key"]);
    assert!(written.code == 0 && written.out.contains("blue"), "{written:?}");
    // The same over v3.
    let etcdctl = |server: &Server, host: &str, args: &[&str]| -> Ran {
        let mut etcdctl = Command::new("etcdctl");
        etcdctl.env("ETCDCTL_API", "3").env("no_proxy", "*").current_dir(at);
        etcdctl.args(["--endpoints", &server.etcd.replace(host, "localhost")]);
        etcdctl.args(["--cacert", "ca.crt", "--command-timeout", "10s"]).args(args);
        etcdctl.args(["get", "/color"]).output().unwrap().into()
    };
    let certified = ["--cert", "client.crt", "--key", "client.key"];
    let found = etcdctl(&server, "0.0.0.0", &certified);
    assert_eq!((found.code, found.out.as_str()), (0, "/color\nblue\n"), "{found:?}");
    let refused = etcdctl(&server, "0.0.0.0", &["--command-timeout", "1s"]);
    assert!(refused.code != 0 && refused.out.is_empty(), "without a certificate: {refused:?}");
    server.stop();

    // On loopback it asks for none, unless it is told to.
    config(at, "[etcd]\ncert = 'etcd.crt'\nkey = 'etcd.key'\n");
    let up = ["up", "--http=127.0.0.1:0", "--etcd=127.0.0.1:0"];
    let server = Server::with(vedetta(at).args(up), at);
    let found = etcdctl(&server, "127.0.0.1", &[]);
    assert_eq!((found.code, found.out.as_str()), (0, "/color\nblue\n"), "{found:?}");
    server.stop();
}

/// The status that the form to sign in answers with.
fn signs_in(server: &Server, password: &str) -> u16 {
    let agent = ureq::Agent::config_builder().proxy(None).http_status_as_error(false);
    let agent = agent.max_redirects(0).max_redirects_will_error(false).build().new_agent();
    let url = format!("{}/login", server.url);
    let mut page = agent.get(&url).call().unwrap();
    let cookie = page.headers()["set-cookie"].to_str().unwrap().to_owned();
    let text = page.body_mut().read_to_string().unwrap();
    let (_, csrf) = text.split_once("name=\"csrf\" value=\"").unwrap();
    let csrf = csrf.split('"').next().unwrap();
    let form = [("csrf", csrf), ("name", "anna"), ("password", password), ("next", "/")];
    let request = agent.post(&url).header("Cookie", cookie.split(';').next().unwrap());
    request.send_form(form).unwrap().status().as_u16()
}

#[test]
fn a_password_that_was_changed_is_the_only_one_that_works() {
    let folder = temp();
    let at = folder.path();
    assert_eq!(typed(at, &["user", "add", "anna"], PASSWORD).code, 0);
    config(at, "[auth]\nenabled = true");
    let server = Server::start(at);
    assert_eq!(signs_in(&server, PASSWORD), 303);
    let changed = typed(at, &["user", "passwd", "anna"], "another horse");
    assert_eq!((changed.code, changed.out.as_str()), (0, "anna was changed\n"), "{changed:?}");
    assert_eq!(signs_in(&server, PASSWORD), 401);
    assert_eq!(signs_in(&server, "another horse"), 303);
    server.stop();
}

#[test]
fn commands_that_the_server_starts_reach_it_with_the_role_they_are_given() {
    for (role, code) in [("operator", "1"), ("admin", "0")] {
        let folder = temp();
        let at = folder.path();
        let program = env!("CARGO_BIN_EXE_vedetta");
        let commands = format!(
            "[auth]\nenabled = true\ncommands = '{role}'\n[handler.note]\n\
             run = ['sh', '-c', '{program} job add other >>told; echo $? >>told; {program} kv put k v; echo $? >>told']\n"
        );
        config(at, &commands);
        let server = Server::start(at);
        let own = token(at, "mine", "operator");
        assert_eq!(with_token(&server, &own, &["job", "add", "note"]).code, 0);
        let told = || fs::read_to_string(at.join("told")).unwrap_or_default();
        until("the command", || told().lines().count() >= 3);
        let told = told();
        let codes: Vec<&str> = told.lines().skip(1).take(2).collect();
        assert_eq!(codes, ["0", code], "{role}: {told}");
        server.stop();
    }
}

#[test]
fn a_secret_in_a_job_is_in_no_log_of_the_server_and_in_no_list() {
    const CANARY: &str = "kanari3nvogel";
    let folder = temp();
    let at = folder.path();
    config(
        at,
        "[handler.sing]\nmax-attempts = 1\n\
         run = ['sh', '-c', 'p=$(cat); echo \"got $p\" >&2; echo \"password=$SONG\" >&2; exit 3']\n",
    );
    let mut up = vedetta(at);
    up.args(["up", "--http", "127.0.0.1:0"]).env("VEDETTA_LOG", "trace").env("SONG", CANARY);
    // A log of everything is long: it goes to a file, so that nobody has to read along.
    let log = at.join("log");
    let server = {
        let mut shell = std::process::Command::new("sh");
        shell.arg("-c").arg("exec \"$0\" \"$@\" 2>log").arg(up.get_program()).args(up.get_args());
        shell.current_dir(at).envs(up.get_envs().filter_map(|(name, value)| Some((name, value?))));
        shell.stdin(Stdio::null());
        Server::with(&mut shell, at)
    };
    let job = |args: &[&str]| -> Ran {
        server.command(&["job"]).args(args).args(["--output", "json"]).output().unwrap().into()
    };
    let payload = format!(r#"{{"api_key": "{CANARY}", "tune": "low"}}"#);
    let id = job(&["add", "sing", "--payload", &payload]).json()["id"].to_string();
    until("the job to fail", || job(&["show", &id]).json()["status"] == "dead");
    for args in [&["list"][..], &["list", "--status", "dead"], &["show", &id]] {
        let shown = job(args);
        assert!(!shown.out.contains(CANARY), "{args:?}: {shown:?}");
        assert!(shown.out.contains("(redacted)") && shown.out.contains("low"), "{shown:?}");
    }
    assert!(job(&["show", &id, "--reveal"]).out.contains(CANARY));
    server.stop();
    let log = fs::read_to_string(log).unwrap();
    assert!(log.contains("stopped") && log.contains("DEBUG"), "{log}");
    assert!(
        !log.contains(CANARY),
        "{}",
        log.lines().find(|line| line.contains(CANARY)).unwrap_or("")
    );
}

#[test]
fn the_doctor_says_when_nobody_could_sign_in() {
    let folder = temp();
    let at = folder.path();
    let check = || {
        let ran = run(at, &["doctor", "--http", "127.0.0.1:0", "--output", "json"]);
        let checks = ran.json()["checks"].clone();
        let access = checks.as_array().unwrap().iter().find(|one| one["name"] == "access");
        access.unwrap()["state"].as_str().unwrap().to_owned()
    };
    assert_eq!(check(), "ok", "nobody has to");
    config(at, "[auth]\nenabled = true");
    assert_eq!(check(), "broken");
    assert!(!at.join("vedetta-data").exists(), "looking makes nothing");
    token(at, "ci", "viewer");
    assert_eq!(check(), "ok");
}

#[test]
fn signing_in_with_curl_works_as_the_documentation_says() {
    let folder = temp();
    let at = folder.path();
    assert_eq!(typed(at, &["user", "add", "anna", "--role", "operator"], PASSWORD).code, 0);
    config(at, "[auth]\nenabled = true");
    let server = Server::start(at);
    let page = include_str!("../../../../docs/access.md");
    let script = page.split("```sh\n").find(|block| block.starts_with("at=http")).unwrap();
    let script = script.split("```").next().unwrap().replace("http://127.0.0.1:7070", &server.url);
    let mut shell = Command::new("sh");
    shell.args(["-ec", &script]).current_dir(at).env("PASSWORD", PASSWORD);
    let ran = Ran::from(shell.env("no_proxy", "*").output().unwrap());
    assert_eq!(ran.code, 0, "{ran:?}");
    assert!(ran.out.contains(r#"{"name":"default","mode":"paused"}"#), "{ran:?}");
    server.stop();
}
