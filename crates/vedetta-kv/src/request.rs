//! What can be asked of the store, and what it answers.

use bytes::Bytes;
use vedetta_core::{KeyRange, Revision};
use vedetta_db::CommitError;

use crate::{KeyValue, LeaseId};

/// Give a key a value.
#[derive(Debug, Clone)]
pub struct Put {
    /// The key.
    pub key: Bytes,
    /// The value.
    pub value: PutValue,
    /// The lease.
    pub lease: PutLease,
    /// Whether the answer should have the key as it was before.
    pub previous: bool,
}

impl Put {
    /// A plain put: no lease, no previous value.
    pub fn new(key: impl Into<Bytes>, value: impl Into<Bytes>) -> Self {
        Self {
            key: key.into(),
            value: PutValue::Set(value.into()),
            lease: PutLease::Set(None),
            previous: false,
        }
    }

    /// The same put, with the key going when `lease` goes.
    #[must_use]
    pub fn lease(mut self, lease: LeaseId) -> Self {
        self.lease = PutLease::Set(Some(lease));
        self
    }
}

/// The value of a put.
#[derive(Debug, Clone)]
pub enum PutValue {
    /// This one.
    Set(Bytes),
    /// The one the key has; it must exist.
    Keep,
}

/// The lease of a put.
#[derive(Debug, Clone, Copy)]
pub enum PutLease {
    /// This one, or none.
    Set(Option<LeaseId>),
    /// The one the key has; it must exist.
    Keep,
}

/// Remove keys.
#[derive(Debug, Clone)]
pub struct Delete {
    /// Which.
    pub range: KeyRange,
    /// Whether the answer should have the keys as they were.
    pub previous: bool,
}

/// Read keys.
#[derive(Debug, Clone)]
pub struct Range {
    /// Which.
    pub range: KeyRange,
    /// As of which revision; `None` for now.
    pub at: Option<Revision>,
    /// How many at most.
    pub limit: Option<usize>,
    /// In which order. Without one it is by key, ascending.
    pub sort: Option<(SortBy, Order)>,
    /// Only how many there are.
    pub count_only: bool,
    /// Do not count what lies beyond the limit: the answer's `count` is then 0.
    pub uncounted: bool,
    /// Leave the values out.
    pub keys_only: bool,
    /// Only keys modified in this revision or later.
    pub min_modified: Option<Revision>,
    /// Only keys modified in this revision or before.
    pub max_modified: Option<Revision>,
    /// Only keys made in this revision or later.
    pub min_created: Option<Revision>,
    /// Only keys made in this revision or before.
    pub max_created: Option<Revision>,
}

impl Range {
    /// All keys of `range` as they are now.
    pub fn new(range: KeyRange) -> Self {
        Self {
            range,
            at: None,
            limit: None,
            sort: None,
            count_only: false,
            uncounted: false,
            keys_only: false,
            min_modified: None,
            max_modified: None,
            min_created: None,
            max_created: None,
        }
    }
}

/// What to sort by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SortBy {
    /// The key.
    Key,
    /// How often it was put.
    Version,
    /// When it was made.
    Created,
    /// When it was last put.
    Modified,
    /// Its value.
    Value,
}

/// Which way to sort.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// Smallest first.
    Ascending,
    /// Largest first.
    Descending,
}

/// If all compares hold do `then`, otherwise `otherwise`; all of it is one revision.
#[derive(Debug, Clone, Default)]
pub struct Txn {
    /// What must hold.
    pub when: Vec<Compare>,
    /// What to do if so.
    pub then: Vec<Op>,
    /// What to do if not.
    pub otherwise: Vec<Op>,
}

impl Txn {
    /// What is done when the compares held, or when they did not.
    pub(crate) fn branch(&self, held: bool) -> &[Op] {
        if held { &self.then } else { &self.otherwise }
    }
}

/// One step of a transaction; it sees what the steps before it did. The compares of a nested transaction
/// do not: like the outer ones they see what was there before.
#[derive(Debug, Clone)]
pub enum Op {
    /// Read keys.
    Range(Range),
    /// Give a key a value.
    Put(Put),
    /// Remove keys.
    Delete(Delete),
    /// A transaction inside.
    Txn(Txn),
}

/// A condition on a key, or on every key of a range.
#[derive(Debug, Clone)]
pub struct Compare {
    /// Which keys. Of a key that does not exist all numbers are 0, and no value compare holds.
    pub range: KeyRange,
    /// How.
    pub op: CompareOp,
    /// With what.
    pub target: CompareTarget,
}

/// How to compare.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CompareOp {
    /// The key's is the same.
    Equal,
    /// The key's is another.
    NotEqual,
    /// The key's is larger.
    Greater,
    /// The key's is smaller.
    Less,
}

/// What of the key to compare, and with what.
#[derive(Debug, Clone)]
pub enum CompareTarget {
    /// How often it was put.
    Version(u64),
    /// When it was made.
    Created(Revision),
    /// When it was last put.
    Modified(Revision),
    /// Its value.
    Value(Bytes),
    /// Its lease; 0 is none.
    Lease(i64),
}

/// The answer to a [`Put`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PutDone {
    /// The revision it is.
    pub revision: Revision,
    /// The key before, if asked for and if it existed.
    pub previous: Option<KeyValue>,
}

/// The answer to a [`Delete`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Deleted {
    /// The store's revision after it; unchanged if there was nothing to delete.
    pub revision: Revision,
    /// How many went.
    pub count: usize,
    /// The keys before, if asked for.
    pub previous: Vec<KeyValue>,
}

/// The answer to a [`Range`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ranged {
    /// The store's revision when it was read.
    pub revision: Revision,
    /// The keys.
    pub keys: Vec<KeyValue>,
    /// Whether the limit left some out.
    pub more: bool,
    /// How many are in the range, whatever the limit and the revision bounds.
    pub count: usize,
}

/// The answer to a [`Txn`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TxnDone {
    /// The store's revision after it.
    pub revision: Revision,
    /// Whether all compares held.
    pub held: bool,
    /// An answer for each step done.
    pub replies: Vec<OpReply>,
}

/// The answer to an [`Op`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OpReply {
    /// To a range.
    Range(Ranged),
    /// To a put.
    Put(PutDone),
    /// To a delete.
    Delete(Deleted),
    /// To a transaction inside.
    Txn(TxnDone),
}

/// Why the store does not do what was asked. Nothing was changed, except where it says otherwise.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum KvError {
    /// That history is gone: read the present and go on from there.
    #[error("revision {asked} was compacted, the oldest kept is {oldest}")]
    Compacted {
        /// What was asked for.
        asked: Revision,
        /// What there is.
        oldest: Revision,
    },
    /// That revision is not here yet.
    #[error("revision {asked} is in the future, the store is at {current}")]
    Future {
        /// What was asked for.
        asked: Revision,
        /// Where the store is.
        current: Revision,
    },
    /// Give a key.
    #[error("the key is empty")]
    EmptyKey,
    /// Use a shorter key.
    #[error("the key has {size} bytes, the limit is {limit}")]
    KeyTooLarge {
        /// Its size.
        size: usize,
        /// The limit.
        limit: usize,
    },
    /// Store less in one key.
    #[error("the value has {size} bytes, the limit is {limit}")]
    ValueTooLarge {
        /// Its size.
        size: usize,
        /// The limit.
        limit: usize,
    },
    /// Split the request, or store less in one key.
    #[error("the request has {size} bytes, the limit is {limit}")]
    RequestTooLarge {
        /// Its size.
        size: usize,
        /// The limit.
        limit: usize,
    },
    /// Split the transaction.
    #[error("the transaction has {ops} operations, the limit is {limit}")]
    TooManyOps {
        /// How many it has.
        ops: usize,
        /// The limit.
        limit: usize,
    },
    /// Transactions inside transactions inside transactions…
    #[error("transactions are nested more than {limit} deep")]
    TooDeep {
        /// The limit.
        limit: usize,
    },
    /// A transaction may change a key only once.
    #[error("the transaction changes the key {0:?} twice")]
    DuplicateKey(Bytes),
    /// Keeping the value or the lease of a key needs the key.
    #[error("the key {0:?} does not exist")]
    KeyNotFound(Bytes),
    /// The lease expired, was revoked, or never was.
    #[error("there is no lease {0}")]
    LeaseNotFound(LeaseId),
    /// Choose another id.
    #[error("the lease {0} exists already")]
    LeaseExists(LeaseId),
    /// Choose a shorter time.
    #[error("a lease may last {limit} seconds at most")]
    TtlTooLarge {
        /// The limit.
        limit: u64,
    },
    /// Delete keys and compact, or raise the quota.
    #[error(
        "the store has {used} bytes, its quota is {quota}: delete keys and compact, or raise it"
    )]
    QuotaExceeded {
        /// Bytes in use.
        used: u64,
        /// Bytes allowed.
        quota: u64,
    },
    /// More writes wait than the queue takes: try again in a moment. See
    /// [`Store::impatient`](crate::Store::impatient).
    #[error("too many writes are waiting; try again in a moment")]
    Busy,
    /// What is stored is not what was written: restore a backup.
    #[error("the row of revision {0} is damaged; restore a backup")]
    Damaged(Revision),
    /// The database could not store it.
    #[error(transparent)]
    Lost(#[from] CommitError),
    /// The database could not be read.
    #[error("cannot read the history: {0}")]
    Unreadable(String),
}
