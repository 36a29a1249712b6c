//! The same requests to the real etcd and to us: the answers must be the same.
//!
//! Indexes, revisions, ids and times are made comparable (counted from where a case began); all else is
//! compared as it came over the wire. A case is a few lines of text, `v2.cases` and `v3.cases` are the
//! tables; the random sequences are lines of the same kind, so a failure prints what replays it.
//!
//! With `VEDETTA_DIFF=etcd` a second etcd stands in for us: what fails then is the suite's own fault.

#[path = "../support/mod.rs"]
mod support;

mod cases;
mod differences;
mod random;
mod v2;
mod v3;
