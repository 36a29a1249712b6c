use std::fmt;
use std::sync::Arc;

use vedetta_core::Revision;

use crate::LeaseId;

/// A key as it is, or was, at some revision.
///
/// Clones share it. All of it is one allocation, since a store has millions and makes one per put:
///
/// ```text
/// ┌─────────┬──────────┬─────────┬───────┬────────────┬─────┬───────┐
/// │ created │ modified │ version │ lease │ key length │ key │ value │    (numbers: little-endian)
/// └─────────┴──────────┴─────────┴───────┴────────────┴─────┴───────┘
///   8 bytes   8          8         8       4
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct KeyValue(Arc<[u8]>);

const HEADER: usize = 36;

impl KeyValue {
    /// Puts one together.
    pub fn new(stamps: Stamps, key: &[u8], value: &[u8]) -> Self {
        Self::pack(stamps, key, value, &mut Vec::new())
    }

    /// The same; `scratch` is for reuse and keeps nothing of worth.
    pub(crate) fn pack(stamps: Stamps, key: &[u8], value: &[u8], scratch: &mut Vec<u8>) -> Self {
        scratch.clear();
        scratch.reserve(HEADER + key.len() + value.len());
        scratch.extend_from_slice(&stamps.created.0.to_le_bytes());
        scratch.extend_from_slice(&stamps.modified.0.to_le_bytes());
        scratch.extend_from_slice(&stamps.version.to_le_bytes());
        scratch.extend_from_slice(&stamps.lease.map_or(0, LeaseId::get).to_le_bytes());
        let length = u32::try_from(key.len()).expect("keys are limited to far less");
        scratch.extend_from_slice(&length.to_le_bytes());
        scratch.extend_from_slice(key);
        scratch.extend_from_slice(value);
        Self(Arc::from(&scratch[..]))
    }

    /// Fills in the numbers of one that nobody else has yet.
    pub(crate) fn stamp(&mut self, stamps: Stamps) {
        if let Some(bytes) = Arc::get_mut(&mut self.0) {
            bytes[..8].copy_from_slice(&stamps.created.0.to_le_bytes());
            bytes[8..16].copy_from_slice(&stamps.modified.0.to_le_bytes());
            bytes[16..24].copy_from_slice(&stamps.version.to_le_bytes());
            let lease = stamps.lease.map_or(0, LeaseId::get);
            bytes[24..32].copy_from_slice(&lease.to_le_bytes());
        } else {
            *self = Self::new(stamps, self.key(), self.value());
        }
    }

    /// A record of nothing but the key.
    pub(crate) fn bare(key: &[u8]) -> Self {
        Self::new(Stamps::default(), key, &[])
    }

    /// The key.
    pub fn key(&self) -> &[u8] {
        self.parts().0
    }

    /// Its value.
    pub fn value(&self) -> &[u8] {
        self.parts().1
    }

    /// The revision that made the key.
    pub fn created(&self) -> Revision {
        Revision(self.number(0))
    }

    /// The revision that gave it this value.
    pub fn modified(&self) -> Revision {
        Revision(self.number(8))
    }

    /// How often it was put since it was made: 1 is the first.
    pub fn version(&self) -> u64 {
        self.number(16)
    }

    /// The lease that will take it along.
    pub fn lease(&self) -> Option<LeaseId> {
        LeaseId::new(self.number(24).cast_signed())
    }

    pub(crate) fn without_value(&self) -> Self {
        let stamps = Stamps {
            created: self.created(),
            modified: self.modified(),
            version: self.version(),
            lease: self.lease(),
        };
        Self::new(stamps, self.key(), &[])
    }

    fn number(&self, at: usize) -> u64 {
        self.0[at..].first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes))
    }

    fn parts(&self) -> (&[u8], &[u8]) {
        let length = self.0[32..].first_chunk().map_or(0, |bytes| u32::from_le_bytes(*bytes));
        self.0[HEADER..].split_at(length as usize)
    }
}

/// The numbers of a [`KeyValue`].
#[derive(Debug, Clone, Copy, Default)]
pub struct Stamps {
    /// The revision that made the key.
    pub created: Revision,
    /// The revision that gave it its value.
    pub modified: Revision,
    /// How often it was put since it was made.
    pub version: u64,
    /// The lease that will take it along.
    pub lease: Option<LeaseId>,
}

impl fmt::Debug for KeyValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeyValue")
            .field("key", &self.key().escape_ascii().to_string())
            .field("value", &self.value().escape_ascii().to_string())
            .field("created", &self.created())
            .field("modified", &self.modified())
            .field("version", &self.version())
            .field("lease", &self.lease())
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_gives_back_what_was_put_in() {
        let stamps = Stamps {
            created: Revision(1 << 40),
            modified: Revision(u64::MAX >> 1),
            version: 3,
            lease: LeaseId::new(-5),
        };
        for (key, value) in [(&b"k"[..], &b"value"[..]), (b"\0\xff", b""), (b"", b"")] {
            let record = KeyValue::pack(stamps, key, value, &mut vec![1; 500]);
            assert_eq!((record.key(), record.value()), (key, value));
            assert_eq!((record.created(), record.modified()), (stamps.created, stamps.modified));
            assert_eq!((record.version(), record.lease()), (3, stamps.lease));
            let mut stamped = KeyValue::new(Stamps::default(), key, value);
            stamped.stamp(stamps);
            assert_eq!(stamped, record);
            let shared = stamped.clone();
            stamped.stamp(Stamps { version: 4, ..stamps });
            assert_eq!((stamped.version(), shared.version()), (4, 3), "others keep theirs");
            assert_eq!(record.without_value().key(), key);
            assert_eq!(record.without_value().version(), 3);
        }
    }
}
