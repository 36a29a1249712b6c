//! The `etcd-client` of Rust, as its users use it.

mod support;

use etcd_client::{
    Client, Compare, CompareOp, DeleteOptions, EventType, GetOptions, LeaseGrantOptions,
    PutOptions, SortOrder, SortTarget, Txn, TxnOp, WatchOptions,
};
use support::{Etcd, Ours, soon};

/// The story, told by either server; revisions are counted from where it begins.
async fn story(address: std::net::SocketAddr) -> Vec<String> {
    let mut told = Vec::new();
    let mut client = Client::connect([address.to_string()], None).await.unwrap();
    let base = client.get("nothing", None).await.unwrap().header().unwrap().revision();

    let mut watch =
        client.watch("a", Some(WatchOptions::new().with_prefix().with_prev_key())).await.unwrap();
    let created = watch.message().await.unwrap().unwrap();
    told.push(format!("watch {} {}", created.watch_id(), created.created()));

    client.put("a", "1", None).await.unwrap();
    let put = client.put("a", "2", Some(PutOptions::new().with_prev_key())).await.unwrap();
    let before = put.prev_key().unwrap();
    told.push(format!("{} was {:?}", put.header().unwrap().revision() - base, before.value_str()));
    client.put("ab", "3", None).await.unwrap();

    let options = GetOptions::new()
        .with_prefix()
        .with_sort(SortTarget::Value, SortOrder::Descend)
        .with_limit(1);
    let found = client.get("a", Some(options)).await.unwrap();
    let key = &found.kvs()[0];
    told.push(format!("{:?} of {}, more {}", key.key_str(), found.count(), found.more()));

    let txn = Txn::new()
        .when([
            Compare::value("a", CompareOp::Equal, "2"),
            Compare::version("ab", CompareOp::Less, 2),
        ])
        .and_then([TxnOp::put("a", "4", None), TxnOp::delete("ab", None), TxnOp::get("a", None)])
        .or_else([TxnOp::get("ab", None)]);
    let done = client.txn(txn).await.unwrap();
    told.push(format!("{} {} answers", done.succeeded(), done.op_responses().len()));

    let mut events = 0;
    while events < 5 {
        let message = soon("events", watch.message()).await.unwrap().unwrap();
        for event in message.events() {
            events += 1;
            let key = event.kv().unwrap();
            let what = if event.event_type() == EventType::Put { "put" } else { "delete" };
            let before = event.prev_kv().map(|key| key.value_str().unwrap().to_owned());
            told.push(format!(
                "{what} {:?} {} before {before:?}",
                key.key_str(),
                key.mod_revision() - base
            ));
        }
    }
    watch.cancel(created.watch_id()).await.unwrap();
    let cancelled = soon("the cancel", watch.message()).await.unwrap().unwrap();
    told.push(format!("cancelled {}", cancelled.canceled()));

    let granted = client.lease_grant(100, Some(LeaseGrantOptions::new().with_id(5))).await.unwrap();
    told.push(format!("lease {} {}", granted.id(), granted.ttl()));
    client.put("leased", "1", Some(PutOptions::new().with_lease(5))).await.unwrap();
    let (mut keeper, mut kept) = client.lease_keep_alive(5).await.unwrap();
    keeper.keep_alive().await.unwrap();
    let alive = soon("kept alive", kept.message()).await.unwrap().unwrap();
    told.push(format!("kept {} {}", alive.id(), alive.ttl()));
    told.push(format!("leases {}", client.leases().await.unwrap().leases().len()));
    client.lease_revoke(5).await.unwrap();
    told.push(format!("left {}", client.get("leased", None).await.unwrap().count()));
    let again = client.lease_revoke(5).await.unwrap_err();
    told.push(again.to_string());

    let missing = client.put("none", "", Some(PutOptions::new().with_ignore_value())).await;
    told.push(missing.unwrap_err().to_string());
    client.compact(base + 3, None).await.unwrap();
    let old = client.get("a", Some(GetOptions::new().with_revision(base + 1))).await.unwrap_err();
    told.push(old.to_string());
    let deleted = client.delete("", Some(DeleteOptions::new().with_all_keys())).await.unwrap();
    told.push(format!("deleted {}", deleted.deleted()));
    told.push(client.status().await.unwrap().version().to_owned());
    told.push(format!("members {}", client.member_list().await.unwrap().members().len()));
    told
}

/// This client leaves both to the server, unlike etcd's own.
#[tokio::test(flavor = "multi_thread")]
async fn the_client_of_rust_is_told_that_locks_and_elections_are_not_served() {
    let ours = Ours::start().await;
    let mut client = Client::connect([ours.address.to_string()], None).await.unwrap();
    let lease = client.lease_grant(100, None).await.unwrap().id();
    let lock = soon("a lock", client.lock("l", None)).await.map(drop);
    let campaign = soon("an election", client.campaign("e", "me", lease)).await.map(drop);
    for refused in [lock, campaign] {
        let etcd_client::Error::GRpcStatus(status) = refused.unwrap_err() else {
            panic!("it is answered");
        };
        assert_eq!(status.code(), tonic::Code::Unimplemented, "{status}");
        assert!(status.message().contains("leaves locks and elections"), "{status}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_client_of_rust_sees_no_difference() {
    let (etcd, ours) = (Etcd::start().await, Ours::start().await);
    assert_eq!(
        story(etcd.address).await,
        story(ours.address).await,
        "the real etcd's are the first"
    );
}
