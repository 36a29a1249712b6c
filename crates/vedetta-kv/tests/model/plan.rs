//! What may happen to a store, and how to make such things up.
//!
//! Few keys, few values, few leases: so that they meet. Revisions are made up relative to where the
//! store will stand ([`Moment`]), written into the requests as large numbers, and put right when the
//! step is run.

use bytes::Bytes;
use proptest::collection::vec;
use proptest::option::{of, weighted};
use proptest::prelude::*;
use proptest::sample::select;
use vedetta_core::{KeyRange, Revision};
use vedetta_kv::{
    Compare, CompareOp, CompareTarget, Delete, LeaseId, Op, Order, Put, PutLease, PutValue, Range,
    SortBy, Txn, WatchOptions,
};

#[derive(Debug, Clone)]
pub(crate) enum Step {
    /// One write.
    Write(Write),
    /// Several that wait in line for the writer and so share one commit.
    Together(Vec<Write>),
    Range(Range),
    KeepAlive(LeaseId),
    /// Puts on a lease of a few milliseconds, whose end is waited for.
    Expire(Vec<Put>),
    Watch {
        slot: usize,
        range: KeyRange,
        options: WatchOptions,
    },
    Drain {
        slot: usize,
    },
    Unwatch {
        slot: usize,
    },
    Restart,
}

#[derive(Debug, Clone)]
pub(crate) enum Write {
    Put(Put),
    Delete(Delete),
    Txn(Txn),
    Compact {
        at: Revision,
        swept: bool,
    },
    Grant(Option<LeaseId>),
    /// Grants [`brief`].
    GrantBrief,
    Revoke(LeaseId),
}

/// The lease that soon ends by itself.
pub(crate) fn brief() -> LeaseId {
    LeaseId::new(99).unwrap()
}

/// How many watchers there may be at once.
pub(crate) const SLOTS: usize = 4;

/// A revision seen from where the store stands.
#[derive(Debug)]
enum Moment {
    /// So many before the newest.
    Back(u64),
    /// So many after it.
    Ahead(u64),
    /// Around the oldest that is kept: 2 is the oldest itself.
    Oldest(u64),
}

const BACK: u64 = 1 << 40;
const AHEAD: u64 = 2 << 40;
const OLDEST: u64 = 3 << 40;

impl Moment {
    fn hidden(&self) -> Revision {
        Revision(match self {
            Self::Back(n) => BACK + n,
            Self::Ahead(n) => AHEAD + n,
            Self::Oldest(n) => OLDEST + n,
        })
    }
}

/// Where the store stands, to put made-up revisions right.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Standing {
    pub(crate) current: Revision,
    pub(crate) oldest: Revision,
}

impl Standing {
    fn right(self, revision: &mut Revision) {
        let n = revision.0 % BACK;
        *revision = Revision(match revision.0 - n {
            BACK => self.current.0.saturating_sub(n),
            AHEAD => self.current.0 + n,
            OLDEST => (self.oldest.0 + n).saturating_sub(2),
            _ => return,
        });
    }

    pub(crate) fn right_range(self, range: &mut Range) {
        let revisions = [
            &mut range.at,
            &mut range.min_modified,
            &mut range.max_modified,
            &mut range.min_created,
            &mut range.max_created,
        ];
        revisions.into_iter().flatten().for_each(|revision| self.right(revision));
    }

    pub(crate) fn right_watch(self, options: &mut WatchOptions) {
        options.from.iter_mut().for_each(|from| self.right(from));
    }

    pub(crate) fn right_write(self, write: &mut Write) {
        match write {
            Write::Compact { at, .. } => self.right(at),
            Write::Txn(txn) => self.right_txn(txn),
            Write::Put(_)
            | Write::Delete(_)
            | Write::Grant(_)
            | Write::GrantBrief
            | Write::Revoke(_) => {}
        }
    }

    fn right_txn(self, txn: &mut Txn) {
        for compare in &mut txn.when {
            if let CompareTarget::Created(revision) | CompareTarget::Modified(revision) =
                &mut compare.target
            {
                self.right(revision);
            }
        }
        for op in txn.then.iter_mut().chain(&mut txn.otherwise) {
            match op {
                Op::Range(range) => self.right_range(range),
                Op::Txn(txn) => self.right_txn(txn),
                Op::Put(_) | Op::Delete(_) => {}
            }
        }
    }
}

pub(crate) fn steps() -> impl Strategy<Value = Vec<Step>> {
    vec(step(), 20..60)
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        45 => write().prop_map(Step::Write),
        7 => vec(write().prop_filter("it waits in line", waits), 2..8).prop_map(Step::Together),
        14 => range().prop_map(Step::Range),
        3 => lease().prop_map(Step::KeepAlive),
        3 => vec(brief_put(), 0..4).prop_map(Step::Expire),
        8 => (0..SLOTS, keys(), watch_options())
            .prop_map(|(slot, range, options)| Step::Watch { slot, range, options }),
        10 => (0..SLOTS).prop_map(|slot| Step::Drain { slot }),
        2 => (0..SLOTS).prop_map(|slot| Step::Unwatch { slot }),
        2 => Just(Step::Restart),
    ]
}

/// Whether it needs the writer.
fn waits(write: &Write) -> bool {
    fn changes(txn: &Txn) -> bool {
        txn.then.iter().chain(&txn.otherwise).any(|op| match op {
            Op::Put(_) | Op::Delete(_) => true,
            Op::Range(_) => false,
            Op::Txn(txn) => changes(txn),
        })
    }
    !matches!(write, Write::Txn(txn) if !changes(txn))
}

fn write() -> impl Strategy<Value = Write> {
    prop_oneof![
        10 => put().prop_map(Write::Put),
        4 => delete().prop_map(Write::Delete),
        6 => txn().prop_map(Write::Txn),
        2 => (moment(), any::<bool>()).prop_map(|(at, swept)| Write::Compact { at, swept }),
        3 => weighted(0.8, lease()).prop_map(Write::Grant),
        1 => lease().prop_map(Write::Revoke),
    ]
}

fn put() -> impl Strategy<Value = Put> {
    let value = prop_oneof![9 => value().prop_map(PutValue::Set), 1 => Just(PutValue::Keep)];
    let to = prop_oneof![
        5 => Just(PutLease::Set(None)),
        3 => lease().prop_map(|id| PutLease::Set(Some(id))),
        1 => Just(PutLease::Keep),
    ];
    (key(), value, to, any::<bool>()).prop_map(|(key, value, lease, previous)| Put {
        key,
        value,
        lease,
        previous,
    })
}

fn brief_put() -> impl Strategy<Value = Put> {
    let lease = PutLease::Set(Some(brief()));
    (key(), value()).prop_map(move |(key, value)| Put {
        key,
        value: PutValue::Set(value),
        lease,
        previous: false,
    })
}

fn delete() -> impl Strategy<Value = Delete> {
    (keys(), any::<bool>()).prop_map(|(range, previous)| Delete { range, previous })
}

fn range() -> impl Strategy<Value = Range> {
    let shape = (weighted(0.3, 0..6_usize), of(sort()), any::<bool>(), weighted(0.1, Just(())));
    let bound = || weighted(0.1, moment());
    let bounds = (bound(), bound(), bound(), bound());
    (keys(), weighted(0.5, moment()), shape, bounds).prop_map(
        |(range, at, (limit, sort, keys_only, count_only), bounds)| Range {
            uncounted: false,
            range,
            at,
            limit,
            sort,
            count_only: count_only.is_some(),
            keys_only,
            min_modified: bounds.0,
            max_modified: bounds.1,
            min_created: bounds.2,
            max_created: bounds.3,
        },
    )
}

fn sort() -> impl Strategy<Value = (SortBy, Order)> {
    let by =
        [SortBy::Key, SortBy::Version, SortBy::Created, SortBy::Modified, SortBy::Value].to_vec();
    (select(by), select(vec![Order::Ascending, Order::Descending]))
}

fn txn() -> impl Strategy<Value = Txn> {
    let flat = branches(flat_op());
    let nested = branches(prop_oneof![3 => flat_op(), 1 => flat.prop_map(Op::Txn)]);
    branches(prop_oneof![4 => flat_op(), 1 => nested.prop_map(Op::Txn)])
}

fn flat_op() -> impl Strategy<Value = Op> + Clone {
    prop_oneof![
        2 => range().prop_map(Op::Range),
        4 => put().prop_map(Op::Put),
        1 => delete().prop_map(Op::Delete),
    ]
    .boxed()
}

fn branches(op: impl Strategy<Value = Op> + 'static) -> impl Strategy<Value = Txn> + Clone {
    let op = op.boxed();
    (vec(compare(), 0..3), vec(op.clone(), 0..4), vec(op, 0..3))
        .prop_map(|(when, then, otherwise)| Txn { when, then, otherwise })
        .boxed()
}

fn compare() -> impl Strategy<Value = Compare> {
    let ops = [CompareOp::Equal, CompareOp::NotEqual, CompareOp::Greater, CompareOp::Less];
    let target = prop_oneof![
        (0..4_u64).prop_map(CompareTarget::Version),
        moment().prop_map(CompareTarget::Created),
        moment().prop_map(CompareTarget::Modified),
        value().prop_map(CompareTarget::Value),
        (0..5_i64).prop_map(CompareTarget::Lease),
    ];
    (keys(), select(ops.to_vec()), target).prop_map(|(range, op, target)| Compare {
        range,
        op,
        target,
    })
}

fn watch_options() -> impl Strategy<Value = WatchOptions> {
    let rarely = || weighted(0.15, Just(())).prop_map(|yes| yes.is_some());
    (weighted(0.7, moment()), weighted(0.8, Just(())), rarely(), rarely()).prop_map(
        |(from, previous, no_puts, no_deletes)| WatchOptions {
            from,
            previous: previous.is_some(),
            no_puts,
            no_deletes,
        },
    )
}

fn moment() -> impl Strategy<Value = Revision> {
    prop_oneof![
        6 => (0..8_u64).prop_map(Moment::Back),
        2 => (0..60_u64).prop_map(Moment::Back),
        2 => (1..4_u64).prop_map(Moment::Ahead),
        2 => (0..5_u64).prop_map(Moment::Oldest),
    ]
    .prop_map(|moment| moment.hidden())
}

fn key() -> impl Strategy<Value = Bytes> {
    const KEYS: [&[u8]; 10] = [
        b"a",
        b"a/",
        b"a/b",
        b"a/b\0",
        b"a/\xff",
        b"a/\xff\xff",
        b"b",
        b"\0",
        b"\xff",
        b"\xff\xff",
    ];
    prop_oneof![
        99 => select(KEYS.to_vec()),
        1 => Just(&b""[..]),
    ]
    .prop_map(Bytes::from_static)
}

fn keys() -> impl Strategy<Value = KeyRange> {
    const PREFIXES: [&[u8]; 6] = [b"", b"a", b"a/", b"a/\xff", b"\xff", b"\xff\xff"];
    prop_oneof![
        4 => key().prop_map(KeyRange::One),
        3 => select(PREFIXES.to_vec()).prop_map(KeyRange::prefix),
        2 => (key(), key()).prop_map(|(start, end)| KeyRange::Between(start, end)),
        1 => key().prop_map(KeyRange::From),
    ]
}

fn value() -> impl Strategy<Value = Bytes> {
    const LONG: &[u8] = &[b'x'; 700];
    select(vec![&b""[..], b"1", b"2", b"2\0", b"\xff", LONG]).prop_map(Bytes::from_static)
}

fn lease() -> impl Strategy<Value = LeaseId> {
    select(vec![1, 2, 3, -4]).prop_map(|id| LeaseId::new(id).unwrap())
}
