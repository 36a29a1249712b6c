//! Where we differ from etcd on purpose: what it does, what we do. The reasons stand in
//! `docs/etcd-compatibility.md`, under the same names.

use crate::cases::{Case, Mismatch, Servers};
use crate::support::http;
use crate::{v2, v3};

/// The last line of the case is answered so by etcd, and so by us.
struct Difference {
    name: &'static str,
    lines: &'static str,
    etcd: &'static str,
    ours: &'static str,
}

impl Difference {
    fn case(&self) -> Case {
        Case {
            name: self.name.into(),
            lines: self.lines.lines().map(|line| line.trim().into()).collect(),
        }
    }

    fn check(&self, case: &Case, outcome: Result<(), Mismatch>) {
        let Err(mismatch) = outcome else { panic!("no difference any more: {}", self.name) };
        let told = mismatch.tell(case);
        assert_eq!(mismatch.at, case.lines.len() - 1, "another line differs: {told}");
        assert!(mismatch.etcd.contains(self.etcd), "etcd does not say {:?}: {told}", self.etcd);
        assert!(mismatch.ours.contains(self.ours), "we do not say {:?}: {told}", self.ours);
    }
}

const V2: &[Difference] = &[
    Difference {
        name: "hidden nodes in history",
        lines: "PUT ~/_hidden | value=1
            PUT ~/seen | value=1
            GET ~?wait=true&recursive=true&waitIndex={1}",
        etcd: "/_hidden",
        ours: "/seen",
    },
    Difference {
        name: "the time to live in an old event",
        lines: "PUT ~/a | value=1&ttl=1
            w: GET ~/a?wait=true
            w
            GET ~/a?wait=true&waitIndex={1}",
        etcd: "\"ttl\":1,",
        ours: "\"expiration\":\"<time>\",\"modifiedIndex\"",
    },
    Difference {
        name: "members",
        lines: "POST /v2/members | x=1",
        etcd: "x-etcd-cluster-id",
        ours: "405",
    },
    Difference { name: "users", lines: "GET /v2/auth/users", etcd: "200", ours: "404" },
    Difference {
        name: "the version",
        lines: "GET /version",
        etcd: "\"etcdcluster\":\"3.4.0\"}",
        ours: "\"etcdcluster\":\"3.4.0\",\"vedetta\":",
    },
];

const V3: &[Difference] = &[
    Difference { name: "the least lease", lines: "grant 7900 0", etcd: "TTL: 2", ours: "TTL: 1" },
    Difference {
        name: "the longest key",
        lines: "put *70000 1",
        etcd: "revision: +1",
        ours: "InvalidArgument: etcdserver: request is too large",
    },
    Difference {
        name: "a put and a delete of one key in a transaction",
        lines: "txn if then txn [ if then put ~d 1 else ] ; txn [ if then del ~d else ] else",
        etcd: "succeeded: true",
        ours: "InvalidArgument: etcdserver: duplicate key given in txn request",
    },
    Difference {
        name: "peers",
        lines: "POST /v3/cluster/member/list {}",
        etcd: "\"peerURLs\":[\"http://",
        ours: "\"clientURLs\":[\"http://",
    },
    Difference {
        name: "an unknown word in JSON",
        lines: "POST /v3/kv/range {\"key\":\"<~a>\",\"sort_order\":\"SIDEWAYS\"}",
        etcd: "SIDEWAYS",
        ours: "\"header\":",
    },
    // It is the last: after it there is no etcd any more.
    Difference {
        name: "an unknown sort target",
        lines: "put ~a 1
            range ~ ~\\xff sort_order=ASCEND sort_target=9",
        etcd: "Un",
        ours: "count: 1",
    },
];

#[tokio::test(flavor = "multi_thread")]
async fn the_differences_are_those_that_are_documented() {
    let documented = include_str!("../../../../docs/etcd-compatibility.md");
    for difference in V2.iter().chain(V3) {
        let name = difference.name;
        assert!(documented.contains(&format!("| {name} |")), "not documented: {name}");
    }
    let servers = Servers::start().await;
    if servers.ours().is_none() {
        return; // an etcd does not differ from itself
    }
    let mut pair = v2::Pair::new(servers.addresses(), None);
    for difference in V2 {
        let case = difference.case();
        difference.check(&case, pair.run(&case).await);
    }
    the_length_of_history(&mut pair).await;
    a_stream_from_the_past(&mut pair).await;
    pages_of_other_sites(&servers).await;
    let mut pair = v3::Pair::new(servers.addresses(), None).await;
    a_delete_at_the_compaction(&mut pair).await;
    for difference in V3 {
        let case = difference.case();
        difference.check(&case, pair.run(&case).await);
    }
}

/// 1,000 events there; here all, until they are compacted.
async fn the_length_of_history(pair: &mut v2::Pair) {
    let mut lines = vec!["PUT ~/first | value=1".to_owned()];
    lines.extend((0..1_000).map(|number| format!("PUT ~/b | value=x{number}")));
    lines.push("GET ~/first?wait=true&waitIndex={1}".into());
    let difference = Difference {
        name: "the length of history",
        lines: "",
        etcd: "\"errorCode\":401",
        ours: "\"key\":",
    };
    let case = Case { name: difference.name.into(), lines };
    difference.check(&case, pair.run(&case).await);
}

/// There, a stream that begins in the past ends after one event without a word: not waited for here.
async fn a_stream_from_the_past(pair: &mut v2::Pair) {
    let lines = [
        "PUT ~/a | value=one",
        "PUT ~/a | value=two",
        "w: GET ~/a?wait=true&stream=true&waitIndex={1}",
        "w+",
        "w+",
        "PUT ~/a | value=three",
        "w+",
    ];
    let told = pair.run_ours(&lines).await;
    assert!(told[3].contains("\"one\"") && told[4].contains("\"two\""), "{told:?}");
    assert!(told[6].contains("\"three\""), "{told:?}");
}

/// There, compacting at the revision of a delete forgets the delete: not waited for here.
async fn a_delete_at_the_compaction(pair: &mut v3::Pair) {
    let lines =
        ["put ~a 1", "del ~a", "compact {2}", "s> watch ~ ~\\xff start_revision={2}", "s", "s*1"];
    let told = pair.run_ours(&lines).await;
    assert!(told[5].contains("type: 1") && told[5].contains("mod_revision: +2"), "{told:?}");
}

async fn pages_of_other_sites(servers: &Servers) {
    let [etcd, ours] = servers.addresses();
    let etcd = http::get(etcd, "/v2/keys").await.unwrap();
    assert_eq!(etcd.header("access-control-allow-origin"), Some("*"));
    let answer = http::get(ours, "/v2/keys").await.unwrap();
    assert_eq!(answer.header("access-control-allow-origin"), None);
    let mut connection = http::Connection::open(ours).await.unwrap();
    let foreign = b"GET /v2/keys HTTP/1.1\r\nHost: localhost\r\nOrigin: http://elsewhere\r\n\r\n";
    assert_eq!(connection.exchange(foreign).await.unwrap().status, 403);
    let renamed = b"GET /v2/keys HTTP/1.1\r\nHost: elsewhere\r\n\r\n";
    assert_eq!(connection.exchange(renamed).await.unwrap().status, 421);
}
