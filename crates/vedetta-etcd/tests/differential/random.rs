//! Random sequences: made from a seed, as lines of the tables, with watches that run along.
//!
//! A sequence that differs is made as short as it gets and printed; put into a table, it is replayed.

use std::fmt::Write as _;

use fastrand::Rng;

use crate::cases::{Case, Mismatch, Servers};
use crate::{v2, v3};

/// Of each API; a sequence has [`LENGTH`] of them.
const OPERATIONS: usize = 11_000;
const LENGTH: usize = 500;
/// Between two looks at the events: etcd drops a v2 watcher that has 100 unread.
const STRIDE: usize = 25;
/// Runs spent on making a failure short.
const SHRINKS: usize = 120;

/// Somebody who runs a case on both servers.
trait Compare {
    async fn run(&mut self, case: &Case) -> Result<(), Mismatch>;
}

impl Compare for v2::Pair {
    async fn run(&mut self, case: &Case) -> Result<(), Mismatch> {
        self.run(case).await
    }
}

impl Compare for v3::Pair {
    async fn run(&mut self, case: &Case) -> Result<(), Mismatch> {
        self.run(case).await
    }
}

fn one_of<'a>(rng: &mut Rng, words: &[&'a str]) -> &'a str {
    words[rng.usize(..words.len())]
}

/// What the second stream of v2 watches. No path is just that: the delete of a watched node is told twice by etcd.
const WATCHED: &str = "~/top/dir";

/// A path of one to three names out of few, so that they meet.
fn path(rng: &mut Rng) -> String {
    let mut path = String::from(if rng.u8(..4) == 0 { WATCHED } else { "~" });
    for _ in 0..rng.usize(1..=3) {
        let _ = write!(path, "/{}", one_of(rng, &["a", "b", "c", "_h", "d-e"]));
    }
    path
}

fn v2_line(rng: &mut Rng, index: u64) -> String {
    let path = path(rng);
    let value = one_of(rng, &["one", "two", "three", "%3C%26%3E", ""]);
    let near = rng.u64(index.saturating_sub(12)..index + 2);
    let mut condition = || match rng.u8(..10) {
        0 => format!("prevValue={}", one_of(rng, &["one", "two", "three"])),
        1 => format!("prevIndex={{{near}}}"),
        2 => format!("prevIndex={{{near}}}&prevValue={}", one_of(rng, &["one", "two"])),
        3 => "prevExist=true".into(),
        4 => "prevExist=false".into(),
        5 => "dir=true".into(),
        6 => "dir=true&prevExist=true".into(),
        7 => "ttl=900".into(),
        8 => "refresh=true&ttl=1900&prevExist=true".into(),
        _ => "noValueOnSuccess=true".into(),
    };
    let condition = condition();
    match rng.u8(..100) {
        0..25 => format!("PUT {path} | value={value}"),
        25..32 => format!("PUT {path} | value={value}&ttl={}", one_of(rng, &["900", "", "1900"])),
        32..55 if condition.starts_with("refresh") => format!("PUT {path}?{condition}"),
        32..55 => format!("PUT {path}?{condition} | value={value}"),
        55..61 => format!("PUT {path}?dir=true"),
        61..66 => format!("POST {path} | value={value}"),
        66..74 => format!("DELETE {path}"),
        74..78 => format!("DELETE {path}?dir=true"),
        78..82 => format!("DELETE {path}?recursive=true"),
        82..86 => format!("DELETE {path}?{condition}"),
        86..92 => format!("GET {path}?recursive=true&sorted=true"),
        92..95 => format!("GET {path}?recursive=true"),
        95..98 => format!("GET {path}"),
        // Something of the last fifty events was below here, or the next line is.
        _ => "GET ~?recursive=true&sorted=true&quorum=true".into(),
    }
}

fn key(rng: &mut Rng) -> String {
    format!("~{}", one_of(rng, &["a", "b", "c", "d", "aa", "ab", "b\\0", "/x/y", "\\xfe"]))
}

fn span(rng: &mut Rng) -> String {
    match rng.u8(..5) {
        0 | 1 => key(rng),
        2 => "~ ~\\xff".into(),
        _ => format!("{} {}", key(rng), key(rng)),
    }
}

fn v3_op(rng: &mut Rng, revision: i64) -> String {
    match rng.u8(..10) {
        0..5 => {
            let value = one_of(rng, &["1", "2", "3", "\"\"", "longer"]);
            let more = one_of(
                rng,
                &["", "", "", "prev_kv", "lease=501", "lease=502", "ignore_lease", "lease=599"],
            );
            let (value, more) =
                if rng.u8(..12) == 0 { ("\"\"", "ignore_value") } else { (value, more) };
            format!("put {} {value} {more}", key(rng))
        }
        5..7 => format!("del {} {}", span(rng), one_of(rng, &["", "prev_kv"])),
        _ => {
            let mut line = format!("range {}", span(rng));
            if rng.bool() {
                let near = rng.i64((revision - 15).max(1)..revision + 2);
                let _ = match rng.u8(..8) {
                    0 => write!(line, " limit={}", rng.u8(..4)),
                    1 | 2 => write!(line, " revision={{{near}}}"),
                    3 => write!(line, " min_mod_revision={{{near}}}"),
                    4 => write!(line, " max_create_revision={{{near}}} limit=2"),
                    5 => write!(line, " keys_only"),
                    6 => write!(line, " count_only"),
                    _ => write!(
                        line,
                        " sort_order={} sort_target={} limit={}",
                        one_of(rng, &["ASCEND", "DESCEND"]),
                        // Versions and values may be equal, and then etcd's order is any.
                        one_of(rng, &["KEY", "MOD"]),
                        rng.u8(..4)
                    ),
                };
            }
            line
        }
    }
}

fn v3_txn(rng: &mut Rng, revision: i64, deep: bool) -> String {
    let mut line = String::from("if");
    for _ in 0..rng.u8(..3) {
        let near = rng.i64((revision - 15).max(1)..revision + 2);
        let (target, value) = match rng.u8(..5) {
            0 => ("version", rng.u8(..3).to_string()),
            1 => ("create_revision", format!("{{{near}}}")),
            2 => ("mod_revision", format!("{{{near}}}")),
            3 => ("lease", one_of(rng, &["0", "501", "502"]).into()),
            _ => ("value", one_of(rng, &["1", "2", "longer"]).into()),
        };
        let of = span(rng).replace(' ', "..");
        let _ = write!(line, " {target}({of}){}{value}", one_of(rng, &["=", "!=", "<", ">"]));
    }
    for part in ["then", "else"] {
        let _ = write!(line, " {part} ");
        let ops: Vec<String> = (0..rng.usize(..4))
            .map(|_| {
                if deep && rng.u8(..8) == 0 {
                    format!("txn [ {} ]", v3_txn(rng, revision, false))
                } else {
                    // One that cannot be applied after another was is the end of the real etcd, and it takes a
                    // put and a delete of one key in two nested transactions, which we refuse.
                    let op = v3_op(rng, revision);
                    let op = if deep {
                        op
                    } else {
                        op.replacen("del ", "range ", 1).replace("prev_kv", "")
                    };
                    op.replace("ignore_value", "")
                        .replace("ignore_lease", "")
                        .replace("lease=599", "")
                        .split(" revision={")
                        .next()
                        .unwrap_or_default()
                        .to_owned()
                }
            })
            .collect();
        line.push_str(&ops.join(" ; "));
    }
    line
}

fn v3_line(rng: &mut Rng, revision: i64) -> String {
    match rng.u8(..20) {
        0..5 => format!("txn {}", v3_txn(rng, revision, true)),
        5 => one_of(
            rng,
            &[
                "grant 501 5000",
                "grant 502 6000",
                "revoke 501",
                "revoke 502",
                "ttl 501",
                "keepalive 502",
                "leases",
            ],
        )
        .into(),
        6 if rng.u8(..6) == 0 => format!("compact {{{}}}", rng.i64(1..revision.max(2))),
        _ => v3_op(rng, revision),
    }
}

/// A sequence with two streams of events, read every few operations up to a mark that is written there, and
/// with waits for events of the past and of the future.
fn v2_case(seed: u64) -> Case {
    let mut rng = Rng::with_seed(seed);
    let mut lines = vec![
        "PUT ~/a | value=one".to_owned(),
        "w: GET ~?wait=true&recursive=true&stream=true".into(),
        format!("v: GET {WATCHED}?wait=true&recursive=true&stream=true"),
    ];
    let mut waits = false;
    // How far the index has come is only guessed: some conditions hit, some do not.
    let mut index = 1;
    for number in 0..LENGTH {
        let line = v2_line(&mut rng, index);
        index += u64::from(!line.starts_with("GET")) * u64::from(rng.u8(..10) < 6);
        lines.push(line);
        if number % STRIDE == STRIDE - 1 {
            // Sometimes all that is watched goes with what is above it.
            if rng.bool() {
                lines.push("DELETE ~/top?recursive=true".into());
            }
            lines.push(format!("PUT {WATCHED}/mark | value=below{number}"));
            lines.push(format!("PUT ~/mark | value=mark{number}"));
            lines.push(format!("w~mark{number}\""));
            lines.push(format!("v~below{number}\""));
            // One that waits for the mark after it began, and one that finds an older mark.
            if waits {
                lines.push("x".into());
            }
            let (back, ahead) = (rng.usize(..=number / 4), rng.u8(1..=2));
            lines.push(format!("GET ~/mark?wait=true&waitIndex={{@-{back}}}"));
            lines.push(format!("x: GET ~/mark?wait=true&waitIndex={{@{ahead}}}"));
            waits = true;
        }
    }
    Case { name: format!("v2, seed {seed}"), lines }
}

/// A sequence with three streams of events that run along, read every few operations up to a mark. Some begin midway and
/// are asked how far they are and cancelled, some look back.
fn v3_case(seed: u64) -> Case {
    let mut rng = Rng::with_seed(seed);
    let mut lines: Vec<String> = [
        "grant 501 5000",
        "grant 502 6000",
        "s> watch ~ ~\\xff prev_kv",
        "s",
        "t> watch ~b",
        "t",
        "u> watch ~a ~c filters=NOPUT prev_kv",
        "u",
    ]
    .map(Into::into)
    .into();
    let mut revision = 1;
    // So many revisions there are for sure: those of the marks.
    let mut marked = 0;
    let mut midway = false;
    for number in 0..LENGTH {
        let line = v3_line(&mut rng, revision);
        revision += i64::from(!line.starts_with("range"));
        lines.push(line);
        if number % STRIDE == STRIDE / 2 {
            midway = rng.bool();
            if midway {
                lines.extend(["w> watch ~ ~\\xff", "w"].map(Into::into));
            }
        }
        if number % STRIDE == STRIDE - 1 {
            let marks =
                [format!("put ~b mark{number}"), "del ~b".into(), format!("put ~c last{number}")];
            marked += marks.len();
            lines.extend(marks);
            lines.extend(["s", "t", "u"].map(|stream| format!("{stream}~mark{number}\"")));
            if midway {
                lines.push(format!("w~last{number}\""));
                lines.extend(["w> progress", "w", "w> cancel 0", "w", "w-"].map(Into::into));
            }
            if rng.u8(..3) == 0 {
                let from = rng.usize(1..=marked);
                let more = one_of(&mut rng, &["", "prev_kv"]);
                lines.push(format!("p> watch ~ ~\\xff start_revision={{{from}}} {more}"));
                lines.extend(["p".into(), format!("p~last{number}\""), "p-".into()]);
            }
        }
    }
    lines.extend(["revoke 501".into(), "revoke 502".into()]);
    Case { name: format!("v3, seed {seed}"), lines }
}

/// Leaves out what a failure does not need.
async fn shrunk(pair: &mut impl Compare, case: &Case, mismatch: Mismatch) -> (Case, Mismatch) {
    let mut best = Case {
        name: case.name.clone(),
        lines: case.lines[..=mismatch.at.min(case.lines.len() - 1)].into(),
    };
    let mut seen = mismatch;
    let mut size = best.lines.len() / 2;
    let mut runs = 0;
    while size > 0 && runs < SHRINKS {
        let mut from = 0;
        while from < best.lines.len() && runs < SHRINKS {
            let mut fewer = best.clone();
            fewer.lines.drain(from..(from + size).min(best.lines.len()));
            runs += 1;
            match pair.run(&fewer).await {
                // A stream that is read without having been opened is another failure.
                Err(other) if !other.etcd.contains("not open") && other.etcd != "no answer" => {
                    fewer.lines.truncate(other.at + 1);
                    (best, seen) = (fewer, other);
                }
                _ => from += size,
            }
        }
        size /= 2;
    }
    (best, seen)
}

async fn compare(pair: &mut impl Compare, case_of: fn(u64) -> Case) {
    let seeds = match std::env::var("VEDETTA_SEED").ok().and_then(|seed| seed.parse().ok()) {
        Some(seed) => seed..=seed,
        None => 1..=(OPERATIONS / LENGTH) as u64,
    };
    for seed in seeds {
        let case = case_of(seed);
        if let Err(mismatch) = pair.run(&case).await {
            // Said at once: what waits for an event that was left out makes the search long.
            eprintln!("{}", mismatch.tell(&case));
            let (short, mismatch) = shrunk(pair, &case, mismatch).await;
            panic!(
                "{}\nreplay with VEDETTA_SEED={seed}, or with these lines:\n{}",
                mismatch.tell(&short),
                short.lines.join("\n")
            );
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn random_v2_sequences_are_answered_as_by_etcd() {
    let servers = Servers::start().await;
    compare(&mut v2::Pair::new(servers.addresses(), None), v2_case).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn random_v3_sequences_are_answered_as_by_etcd() {
    let servers = Servers::start().await;
    compare(&mut v3::Pair::new(servers.addresses(), None).await, v3_case).await;
}
