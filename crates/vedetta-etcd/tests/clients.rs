//! Clients people have: `etcdctl` in both API versions, and `curl`.
//!
//! Each command runs against the real etcd and against us; what it prints and how it ends must be the
//! same, but for ids and times. (With `VEDETTA_DIFF=etcd` a second etcd stands in for us.)

mod support;

use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::process::Stdio;

use support::{Etcd, Ours, program, scratch, soon};
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdout};

/// The real etcd and us, fresh.
struct Both {
    etcd: Etcd,
    ours: Option<Ours>,
    stand_in: Option<Etcd>,
}

impl Both {
    async fn start() -> Self {
        let stands_in = std::env::var("VEDETTA_DIFF").is_ok_and(|who| who == "etcd");
        let etcd = Etcd::start().await;
        if stands_in {
            Self { etcd, ours: None, stand_in: Some(Etcd::start().await) }
        } else {
            Self { etcd, ours: Some(Ours::start().await), stand_in: None }
        }
    }

    /// Brings the v2 indexes to the same number: the real etcd has written some things about itself.
    async fn align(&self) {
        let index = async |address| {
            let nothing = support::http::get(address, "/v2/keys/_nothing").await.unwrap();
            nothing.header("x-etcd-index").and_then(|index| index.parse::<u64>().ok()).unwrap()
        };
        let [etcd, ours] = self.addresses();
        while index(ours).await < index(etcd).await {
            run("2", ours, "set /_align 1").await;
        }
    }

    /// The real one first.
    fn addresses(&self) -> [SocketAddr; 2] {
        let ours = self.ours.as_ref().map(|ours| ours.address);
        let ours = ours.or(self.stand_in.as_ref().map(|etcd| etcd.address));
        [self.etcd.address, ours.expect("one of them runs")]
    }
}

/// `etcdctl`, or whatever the first word of a line says, for one of the servers.
fn command(api: &str, address: SocketAddr, line: &str, folder: &Path) -> tokio::process::Command {
    let line = line.replace("@folder", folder.to_str().expect("a folder's name is text"));
    let line = line.replace("@server", &address.to_string());
    let words = words(&line);
    let mut command = if words[0] == "curl" {
        let mut curl = program("curl");
        curl.args(["-s", "-S", "-w", "\nHTTP %{http_code}\n"]).args(&words[1..]);
        curl
    } else {
        let mut etcdctl = program("etcdctl");
        etcdctl.env("ETCDCTL_API", api);
        etcdctl.arg(format!("--endpoints=http://{address}")).args(&words);
        etcdctl
    };
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut command = tokio::process::Command::from(command);
    command.kill_on_drop(true);
    command
}

/// Splits at spaces that are not in single quotes.
fn words(line: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let (mut quoted, mut empty) = (false, true);
    for c in line.chars() {
        match c {
            '\'' => {
                quoted = !quoted;
                empty = false;
            }
            ' ' if !quoted => {
                if !empty {
                    words.push(String::new());
                }
                empty = true;
            }
            c => {
                words.last_mut().expect("there is a word").push(c);
                empty = false;
            }
        }
    }
    words
}

/// What it printed and how it ended, without what cannot be the same.
async fn told(api: &str, address: SocketAddr, line: &str, input: &str, folder: &Path) -> String {
    let mut running = command(api, address, line, folder).spawn().expect("the command can be run");
    let mut stdin = running.stdin.take().expect("its input is ours");
    stdin.write_all(input.replace("\\n", "\n").as_bytes()).await.expect("it reads");
    drop(stdin);
    let done = soon(line, running.wait_with_output()).await.expect("it ends");
    let text = format!(
        "exit {:?}\n{}{}",
        done.status.code(),
        String::from_utf8_lossy(&done.stdout),
        String::from_utf8_lossy(&done.stderr)
    );
    comparable(&text, address, folder)
}

/// Without the client's own log, addresses, ids (long numbers, in hex too), folders and times.
fn comparable(text: &str, address: SocketAddr, folder: &Path) -> String {
    let said = text.lines().filter(|line| !line.starts_with("{\"level\":\"warn\""));
    let text = said.collect::<Vec<_>>().join("\n");
    let text = text.replace(&address.to_string(), "<server>");
    let text = text.replace(folder.to_str().expect("a folder's name is text"), "<folder>");
    let mut whole = String::new();
    let mut word = String::new();
    for c in text.chars().chain([' ']) {
        if c.is_ascii_alphanumeric() {
            word.push(c);
            continue;
        }
        let id = word.len() >= 12 && word.chars().all(|c| c.is_ascii_hexdigit());
        whole.push_str(if id { "<id>" } else { &word });
        word.clear();
        whole.push(c);
    }
    whole
}

fn without_numbers(text: &str) -> String {
    let mut whole = String::new();
    for c in text.chars() {
        if !c.is_ascii_digit() {
            whole.push(c);
        } else if !whole.ends_with('N') {
            whole.push('N');
        }
    }
    ["N.Nµs", "Nµs", "N.Nms", "Nms"].iter().fold(whole, |text, time| text.replace(time, "<time>"))
}

/// The same, but for the numbers that say how it ended.
fn without_numbers_of_its_own(text: &str) -> String {
    let lines = text.lines().map(|line| {
        let ended = ["exit ", "HTTP "].iter().any(|how| line.starts_with(how));
        if ended { line.to_owned() } else { without_numbers(line) }
    });
    lines.collect::<Vec<_>>().join("\n")
}

/// Without the addresses of peers: we have none, and over v2 that of clients is told for it.
fn without_peers(text: &str) -> String {
    let mut whole = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once("http://127.0.0.1:") {
        whole.push_str(before);
        rest = after.trim_start_matches(|c: char| c.is_ascii_digit());
    }
    whole.push_str(rest);
    let lines = whole.lines().filter(|line| !line.starts_with("\"PeerURL\""));
    let whole = lines.collect::<Vec<_>>().join("\n");
    whole.replace("peerURLs=http://<server>", "peerURLs=").replace("\"peerURLs\":[\"\"],", "")
}

/// Runs each line on both. `line << input` has something to read; `~ line` is compared with its numbers
/// left out, but for those it ended with, `% line` without what peers would use; `? line` may differ in what it says, not in how it ends.
async fn compare(api: &str, table: &str) {
    let both = Both::start().await;
    if api == "2" {
        both.align().await;
    }
    let folders = [TempDir::new().unwrap(), TempDir::new().unwrap()];
    let mut differences = Vec::new();
    for line in
        table.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'))
    {
        let (how, rest) = match line.split_once(' ') {
            Some((how @ ("~" | "?" | "%"), rest)) => (how, rest),
            _ => ("", line),
        };
        let (rest, input) = rest.split_once(" << ").unwrap_or((rest, ""));
        let [etcd, ours] = both.addresses();
        let (etcd, ours) = tokio::join!(
            told(api, etcd, rest, input, folders[0].path()),
            told(api, ours, rest, input, folders[1].path())
        );
        let compared = |text: &str| match how {
            "~" => without_numbers_of_its_own(text),
            "%" => without_peers(text),
            "?" => text.lines().next().unwrap_or_default().to_owned(),
            _ => text.to_owned(),
        };
        if compared(&etcd) != compared(&ours) {
            differences.push(format!("$ {line}\n--- etcd {etcd}\n--- ours {ours}\n"));
        }
    }
    assert!(
        differences.is_empty(),
        "{} commands differ\n{}",
        differences.len(),
        differences.join("\n")
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn etcdctl_of_v3_prints_the_same() {
    compare(
        "3",
        r#"
        get nothing
        put a 1
        put a 2
        put --prev-kv a 3
        put b '' 
        put '' x
        put b << from input
        put c 1 -w json
        put d 1 -w fields
        get a
        get a -w json
        get a -w fields
        get a -w simple
        get a d
        get a --prefix
        get '' --prefix
        get '' --from-key
        get b --from-key --keys-only
        get '' --prefix --limit=2
        get '' --prefix --limit=2 --order=DESCEND
        get '' --prefix --order=DESCEND --sort-by=MODIFY
        get '' --prefix --order=ASCEND --sort-by=VALUE --print-value-only
        get '' --prefix --sort-by=NONSENSE
        get a --rev=2
        get a --rev=3 -w json
        get a --rev=1000
        get a --consistency=s
        get a --hex
        get '' --prefix --count-only -w fields
        get
        get a b c
        del none
        del a --prev-kv
        del b d
        del '' --prefix
        put x/1 one
        put x/2 two
        put x/3 three
        del x/ --prefix --prev-kv
        put t 1
        txn << value("t") = "1"\n\nput t 2\nget t\n\nput t 3\n\n
        txn << value("t") = "1"\n\nput t 2\n\nget t\ndel t\n\n
        txn << mod("t") > "0"\ncreate("t") = "0"\nver("t") < "100"\n\nget t\n\nput t 9\nput u 9\n\n
        txn << \n\nput t 9\nput t 9\n\n\n
        txn -w json << ver("t") > "0"\n\nget t\n\n\n
        txn << nonsense\n
        get '' --prefix
        lease grant 100
        lease grant 99999999999
        lease list
        lease timetolive 1234
        lease timetolive 1234 --keys
        lease revoke 1234
        lease revoke nonsense
        lease keep-alive --once 1234
        put leased 1 --lease=1234
        put leased 1 --lease=nonsense
        put t '' --ignore-value
        put t --ignore-value
        put none --ignore-value
        put t 1 --ignore-lease
        compaction 5
        compaction 5
        compaction 3
        compaction 100000
        compaction nonsense
        get t --rev=4
        get t --rev=4 -w json
        compaction 8 --physical
        watch --rev=3 t
        ~ endpoint health
        ~ endpoint health -w json
        ~ endpoint status
        ? endpoint status -w table
        ~ endpoint status -w fields
        ~ endpoint hashkv
        % member list
        % member list -w json
        % member list -w fields
        alarm list
        alarm disarm
        defrag
        ~ snapshot save @folder/snapshot.db
        snapshot status @folder/nothing.db
        auth disable
        check datascale --help
        version
        lock l -- echo held
        lock l -- false
        elect e proposal -- nonsense
        curl -X POST http://@server/v3/kv/put -d '{"key":"Zm9v","value":"YmFy"}'
        curl -X POST http://@server/v3/kv/range -d '{"key":"Zm9v"}'
        curl http://@server/health
        "#,
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn etcdctl_of_v2_and_curl_print_the_same() {
    compare(
        "2",
        r"
        ls
        get /none
        set /a 1
        set a 2
        set /a 3 --ttl 900
        set /a 4 --swap-with-value 3
        set /a 5 --swap-with-value wrong
        ~ set /a 5 --swap-with-index 1
        set /a << from input
        set /a
        get /a
        get a
        ~ -o extended get /a
        ~ -o json get /a
        ~ -o extended set /a 6
        get /a/b
        mk /b 1
        mk /b 2
        mk /c/d 1
        mk --in-order /q 1
        ~ mk --in-order /q 2
        mkdir /dir
        mkdir /dir
        mkdir /ttl --ttl 900
        mkdir /b
        setdir /dir
        setdir /other
        update /b 3
        update /none 3
        update /b 4 --ttl 900
        updatedir /dir --ttl 900
        updatedir /none --ttl 900
        updatedir /b --ttl 900
        ls --sort
        ls --sort --recursive
        ls --sort -p
        ls --sort -r -p /
        ls /none
        ls /b
        ls /dir
        ls /c
        set /dir 1
        get /dir
        set /b/x 1
        rm /none
        rm /dir
        rm --dir /dir
        rm /c
        rm --dir /c
        rm --recursive /c
        rm /a --with-value wrong
        ~ rm /a --with-index 1
        rm /a
        rmdir /other
        rmdir /q
        rmdir /b
        rmdir /none
        rm /b
        set /_hidden 1
        ls --sort
        ls /_hidden
        get /_hidden
        set /with%20escape 1
        set '/with space/<b>&' '<v>&'
        ls --sort --recursive
        get '/with space/<b>&'
        ~ -o json get '/with space/<b>&'
        set '/ü' 'ö'
        get '/ü'
        -o extended ls
        % member list
        cluster-health
        ~ --debug get /b
        watch --help
        curl http://@server/v2/keys/x -X PUT -d value=1 -o /dev/null
        ~ curl http://@server/v2/keys/x
        ~ curl -L http://@server/v2/keys/x -X PUT -d value='a b' -d ttl=900
        ~ curl -L http://@server/v2/keys/x -X PUT --data-urlencode 'value=ü&<>'
        ~ curl -L http://@server/v2/keys/x -X PUT -F value=multipart
        ~ curl -L http://@server/v2/keys/x?prevExist=false -X PUT -d value=1
        ~ curl -L http://@server/v2/keys//x
        ~ curl http://@server/v2/keys/q -X POST -d value=1
        ~ curl http://@server/v2/keys/x -X DELETE
        ~ curl http://@server/v2/keys/x -X PUT -H 'Expect: 100-continue' -d value=1
        ~ curl -T @folder/nothing http://@server/v2/keys/x
        curl http://@server/health
        curl http://@server/v2/machines
        curl -G http://@server/v2/keys/none -d recursive=true -o /dev/null
        ",
    )
    .await;
}

/// A command that goes on, and what it prints.
struct Running {
    process: Child,
    output: Lines<BufReader<ChildStdout>>,
    address: SocketAddr,
}

impl Running {
    fn start(api: &str, address: SocketAddr, line: &str) -> Self {
        let mut process = command(api, address, line, Path::new("/nowhere")).spawn().unwrap();
        let output = BufReader::new(process.stdout.take().unwrap()).lines();
        Self { process, output, address }
    }

    /// Its next lines.
    async fn take(&mut self, lines: usize) -> Vec<String> {
        let mut taken = Vec::new();
        for _ in 0..lines {
            let line = soon("a line of a command", self.output.next_line()).await.unwrap();
            let line = line.unwrap_or("(the end)".into());
            taken.push(comparable(&line, self.address, Path::new("/nowhere")));
        }
        taken
    }

    /// As Ctrl-C does, so that it cleans up.
    async fn interrupt(mut self) {
        let process = self.process.id().expect("it runs").to_string();
        program("kill").args(["-INT", &process]).status().unwrap();
        soon("a command ends when interrupted", self.process.wait()).await.unwrap();
    }
}

/// What a watching command prints first. Nobody tells when it has got through: what it missed is written
/// again.
async fn written_until_seen(address: SocketAddr, write: &str, watch: &mut Running) -> String {
    loop {
        run("2", address, write).await;
        let soon = tokio::time::timeout(std::time::Duration::from_millis(200), watch.take(1));
        if let Some(line) = soon.await.ok().and_then(|mut lines| lines.pop()) {
            return line;
        }
    }
}

/// A command that runs to its end.
async fn run(api: &str, address: SocketAddr, line: &str) -> String {
    told(api, address, line, "", Path::new("/nowhere")).await
}

/// What a story told by each of the two servers must be: the same.
async fn same(story: impl AsyncFn(SocketAddr) -> Vec<String>) -> Vec<String> {
    let both = Both::start().await;
    let [etcd, ours] = both.addresses();
    let (etcd, ours) = tokio::join!(
        soon("the story at etcd", story(etcd)),
        soon("the story at ours", story(ours))
    );
    assert_eq!(etcd, ours, "the real etcd's are the first");
    ours
}

#[tokio::test(flavor = "multi_thread")]
async fn etcdctl_watches_v3() {
    let told = same(async |address| {
        let mut told = Vec::new();
        // A watch that began in the past has begun, whenever the process gets to it.
        run("3", address, "put w/a 1").await;
        let mut watch = Running::start("3", address, "watch w/ --prefix --rev=2 --prev-kv");
        let mut json = Running::start("3", address, "watch w/a --rev=2 -w json");
        told.extend(watch.take(3).await);
        // Each by itself: what comes together is one line of JSON.
        let mut lines = json.take(1).await;
        for line in ["put w/a 2", "del w/a"] {
            run("3", address, line).await;
            lines.extend(json.take(1).await);
        }
        run("3", address, "put w/b 3").await;
        told.extend(watch.take(5 + 5 + 3).await);
        told.extend(lines);
        watch.interrupt().await;
        json.interrupt().await;
        let line = "watch w/ --prefix --rev=2 -- sh -c 'echo $ETCD_WATCH_EVENT_TYPE $ETCD_WATCH_KEY $ETCD_WATCH_REVISION'";
        let mut executing = Running::start("3", address, line);
        told.extend(executing.take(4).await.into_iter().filter(|line| line.contains("w/")));
        told
    })
    .await;
    assert_eq!(told[..3], ["PUT ", "w/a ", "1 "]);
}

#[tokio::test(flavor = "multi_thread")]
async fn etcdctl_watches_v2() {
    let told = same(async |address| {
        let mut told = Vec::new();
        run("2", address, "set /w/a 1").await;
        let index: u64 = run("2", address, "-o extended get /w/a")
            .await
            .lines()
            .find_map(|line| line.strip_prefix("Created-Index: ")?.trim().parse().ok())
            .expect("an index");
        let line = format!("watch /w/a --after-index {}", index - 1);
        told.extend(Running::start("2", address, &line).take(1).await);
        let line = format!("watch /w --recursive --forever --after-index {}", index - 1);
        let mut forever = Running::start("2", address, &line);
        told.extend(forever.take(1).await);
        run("2", address, "set /w/b 2").await;
        told.extend(forever.take(1).await);
        run("2", address, "update /w/b 3").await;
        told.extend(forever.take(1).await);
        run("2", address, "rm /w/b").await;
        told.extend(forever.take(1).await);
        forever.interrupt().await;
        let line = "exec-watch --recursive /w -- sh -c 'echo $ETCD_WATCH_ACTION $ETCD_WATCH_KEY $ETCD_WATCH_VALUE'";
        let mut executing = Running::start("2", address, line);
        told.push(written_until_seen(address, "set /w/a again", &mut executing).await);
        told
    })
    .await;
    assert!(told.len() >= 6, "{told:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn etcdctl_locks_and_elects() {
    same(async |address| {
        let mut told = Vec::new();
        let mut holder = Running::start("3", address, "lock mutex");
        told.extend(holder.take(1).await);
        let mut next = Running::start("3", address, "lock mutex -- echo mine");
        while !run("3", address, "get mutex/ --prefix --keys-only -w fields")
            .await
            .contains("\"Count\" : 2")
        {}
        told.push(run("3", address, "get mutex/ --prefix --print-value-only").await);
        holder.interrupt().await;
        told.extend(next.take(2).await);
        let mut leader = Running::start("3", address, "elect post first");
        told.extend(leader.take(2).await);
        let mut listener = Running::start("3", address, "elect -l post");
        told.extend(listener.take(2).await);
        let mut second = Running::start("3", address, "elect post second");
        while !run("3", address, "get post/ --prefix --keys-only -w fields")
            .await
            .contains("\"Count\" : 2")
        {}
        leader.interrupt().await;
        told.extend(second.take(2).await);
        told.extend(listener.take(2).await);
        second.interrupt().await;
        told.push(run("3", address, "get post --prefix").await);
        told
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn etcdctl_keeps_leases_alive() {
    same(async |address| {
        let granted = run_plain(address, "lease grant 2 -w json").await;
        let id = granted
            .split("\"ID\":")
            .nth(1)
            .expect("an id")
            .split(',')
            .next()
            .expect("digits")
            .to_owned();
        let id = format!("{:x}", id.parse::<i64>().expect("a number"));
        run("3", address, &format!("put leased 1 --lease={id}")).await;
        let mut keeper = Running::start("3", address, &format!("lease keep-alive {id}"));
        let mut told = keeper.take(3).await;
        told.push(run("3", address, "get leased").await);
        told.push(run("3", address, &format!("lease keep-alive --once {id}")).await);
        keeper.interrupt().await;
        told.push(
            run("3", address, &format!("lease timetolive {id} --keys"))
                .await
                .replace("remaining(1s)", "remaining(2s)"),
        );
        let mut watch = Running::start("3", address, "watch leased --rev=2");
        told.extend(watch.take(3 + 3).await);
        told.push(run("3", address, &format!("lease keep-alive {id}")).await);
        told.push(run("3", address, &format!("lease timetolive {id}")).await);
        told.push(run("3", address, &format!("lease revoke {id}")).await);
        told
    })
    .await;
}

/// With its ids.
async fn run_plain(address: SocketAddr, line: &str) -> String {
    let running = command("3", address, line, Path::new("/nowhere")).spawn().unwrap();
    let done = soon(line, running.wait_with_output()).await.unwrap();
    String::from_utf8_lossy(&done.stdout).into_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn curl_follows_a_stream() {
    let told = same(async |address| {
        let line = "curl -N http://@server/v2/keys/s?wait=true&stream=true&recursive=true";
        let mut stream = Running::start("2", address, line);
        written_until_seen(address, "set /s/a 1", &mut stream).await;
        run("2", address, "rm /s/a").await;
        let mut told = stream.take(1).await;
        while told.last().is_some_and(|line| line.contains("\"set\"")) {
            told = stream.take(1).await;
        }
        assert!(told[0].contains("\"action\":\"delete\""), "{told:?}");
        // From here on both see the same.
        for line in ["set /s/b one", "set /s/b two", "update /s/b three", "mk /s/c/d four"] {
            run("2", address, line).await;
        }
        run("2", address, "rm --recursive /s").await;
        told.extend(stream.take(5).await);
        told.iter().map(|line| without_numbers(line)).collect()
    })
    .await;
    let actions = ["delete", "set", "set", "update", "create", "delete"];
    for (line, action) in told.iter().zip(actions) {
        assert!(line.starts_with(&format!("{{\"action\":\"{action}\",")), "{action}: {told:?}");
    }
    assert_eq!(told.len(), actions.len());
}

/// A client that asks for all members goes to where they are told to be.
#[tokio::test(flavor = "multi_thread")]
async fn a_server_on_all_addresses_tells_the_one_it_is_asked_at() {
    let everywhere = (Ipv4Addr::UNSPECIFIED, 0).into();
    let ours = Ours::start_on(everywhere, scratch(), |endpoint| endpoint).await;
    for ip in [[127, 0, 0, 1], [127, 0, 0, 2]] {
        let address = SocketAddr::from((ip, ours.address.port()));
        for (api, line) in [
            ("3", "member list"),
            ("3", "endpoint status --cluster"),
            ("3", "curl http://@server/v3/cluster/member/list -X POST"),
            ("2", "member list"),
            ("2", "curl http://@server/v2/machines"),
            ("2", "curl --http2-prior-knowledge http://@server/v2/machines"),
        ] {
            let said = run(api, address, line).await;
            assert!(said.starts_with("exit Some(0)"), "{line}: {said}");
            assert!(said.contains("http://<server>"), "{line}: {said}");
            assert!(!said.contains("0.0.0.0"), "{line}: {said}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn etcdctl_saves_a_snapshot_that_we_start_from() {
    let ours = Ours::start().await;
    run("3", ours.address, "put kept 1").await;
    let folder = TempDir::new().unwrap();
    let line = "snapshot save @folder/vedetta.db";
    let saved = told("3", ours.address, line, "", folder.path()).await;
    assert!(saved.starts_with("exit Some(0)"), "{saved}");
    // A file of ours is none that etcd starts from.
    let line = "snapshot status @folder/vedetta.db";
    let status = told("3", ours.address, line, "", folder.path()).await;
    assert!(!status.starts_with("exit Some(0)"), "{status}");
    // One of etcd's is.
    let (etcd, theirs) = (Etcd::start().await, TempDir::new().unwrap());
    for line in ["snapshot save @folder/db", "snapshot status @folder/db"] {
        let done = told("3", etcd.address, line, "", theirs.path()).await;
        assert!(done.starts_with("exit Some(0)"), "{line}: {done}");
    }
    let again = Ours::start_in(folder, |endpoint| endpoint).await;
    assert_eq!(run("3", again.address, "get kept --print-value-only").await, "exit Some(0)\n1 ");
}

#[tokio::test(flavor = "multi_thread")]
async fn etcdctl_lists_shows_and_revokes_the_lease_of_a_v2_time_to_live() {
    let ours = Ours::start().await;
    run("2", ours.address, "set /brief 1 --ttl 900").await;
    let list = run_plain(ours.address, "lease list").await;
    let id = list.lines().last().expect("a lease").trim();
    assert!(id.len() == 16 && id.chars().all(|c| c.is_ascii_hexdigit()), "{list}");
    let left = run_plain(ours.address, &format!("lease timetolive {id} --keys")).await;
    assert!(left.contains("granted with TTL(900s)") && left.contains("[/brief]"), "{left}");
    let revoked = run_plain(ours.address, &format!("lease revoke {id}")).await;
    assert!(revoked.contains(&format!("lease {id} revoked")), "{revoked}");
    let gone = run("2", ours.address, "get /brief").await;
    assert!(gone.contains("Key not found"), "{gone}");
}

/// Documented in `docs/etcd-compatibility.md`.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_served_says_so() {
    let ours = Ours::start().await;
    let lines = [
        "member add another --peer-urls=http://127.0.0.1:1",
        "member remove 1234",
        "member promote 1234",
        "move-leader 1234",
        "user list",
        "role add reader",
    ];
    for line in lines {
        let told = run("3", ours.address, line).await;
        assert!(told.starts_with("exit Some(1)"), "{line}: {told}");
        assert!(told.contains("vedetta does not serve this call"), "{line}: {told}");
    }
}
