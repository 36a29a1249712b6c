//! The row of a revision: all its events, with a checksum.
//!
//! ```text
//! ┌────────┬───────────┬──────────────┬─────────┬─────────┬───
//! │ format │ CRC-32 LE │ event count  │ event   │ event   │ …     (count and events: postcard)
//! └────────┴───────────┴──────────────┴─────────┴─────────┴───
//!  1 byte    4 bytes     over revision, count and events
//! ```

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use vedetta_core::Revision;

use crate::{Cause, Change, Event, KeyValue, LeaseId, Stamps};

const FORMAT: u8 = 1;
const HEADER: usize = 5;

/// A row that is not what was written: the disk changed it, or something else wrote to the file.
#[derive(Debug, Clone, thiserror::Error)]
#[error("the row of revision {0} is damaged")]
pub(crate) struct Damaged(pub(crate) Revision);

#[derive(Serialize, Deserialize)]
enum Stored<'a> {
    Put {
        #[serde(borrow, with = "serde_bytes")]
        key: &'a [u8],
        #[serde(borrow, with = "serde_bytes")]
        value: &'a [u8],
        created: u64,
        version: u64,
        lease: i64,
        tag: u8,
    },
    Delete {
        #[serde(borrow, with = "serde_bytes")]
        key: &'a [u8],
        expired: bool,
        tag: u8,
    },
}

/// Appends the row of `revision` to `row`.
pub(crate) fn encode(revision: Revision, events: &[Event], row: &mut Vec<u8>) {
    let start = row.len();
    row.extend_from_slice(&[FORMAT, 0, 0, 0, 0]);
    let mut out = std::mem::take(row);
    let mut append = |value: &dyn Fn(Vec<u8>) -> postcard::Result<Vec<u8>>| {
        out = value(std::mem::take(&mut out)).expect("appending to a Vec does not fail");
    };
    append(&|row| postcard::to_extend(&events.len(), row));
    for event in events {
        let stored = match &event.change {
            Change::Put(now) => Stored::Put {
                key: now.key(),
                value: now.value(),
                created: now.created().0,
                version: now.version(),
                lease: now.lease().map_or(0, LeaseId::get),
                tag: event.tag,
            },
            Change::Delete { key, cause } => {
                Stored::Delete { key, expired: *cause == Cause::Expired, tag: event.tag }
            }
        };
        append(&|row| postcard::to_extend(&stored, row));
    }
    *row = out;
    let crc = checksum(revision, &row[start + HEADER..]);
    row[start + 1..start + HEADER].copy_from_slice(&crc.to_le_bytes());
}

/// Reads a row back, handing each event to `each`. `previous` is left empty: it is in another row.
pub(crate) fn decode(
    revision: Revision,
    row: &[u8],
    mut each: impl FnMut(Event),
) -> Result<(), Damaged> {
    let damaged = || Damaged(revision);
    let mut scratch = Vec::new();
    let (&[format, a, b, c, d], payload) = row.split_first_chunk().ok_or_else(damaged)?;
    if format != FORMAT || u32::from_le_bytes([a, b, c, d]) != checksum(revision, payload) {
        return Err(damaged());
    }
    let (count, mut rest) = postcard::take_from_bytes::<usize>(payload).map_err(|_| damaged())?;
    for _ in 0..count {
        let (stored, after) =
            postcard::take_from_bytes::<Stored<'_>>(rest).map_err(|_| damaged())?;
        rest = after;
        let (change, tag) = match stored {
            Stored::Put { key, value, created, version, lease, tag } => {
                let stamps = Stamps {
                    created: Revision(created),
                    modified: revision,
                    version,
                    lease: LeaseId::new(lease),
                };
                (Change::Put(KeyValue::pack(stamps, key, value, &mut scratch)), tag)
            }
            Stored::Delete { key, expired, tag } => {
                let cause = if expired { Cause::Expired } else { Cause::Asked };
                (Change::Delete { key: Bytes::copy_from_slice(key), cause }, tag)
            }
        };
        each(Event { revision, change, previous: None, tag });
    }
    Ok(())
}

/// The row's own checksum, for sums over many rows. `None` when it is too short to have one.
pub(crate) fn stamp(row: &[u8]) -> Option<u32> {
    let (&[_, a, b, c, d], _) = row.split_first_chunk()?;
    Some(u32::from_le_bytes([a, b, c, d]))
}

fn checksum(revision: Revision, payload: &[u8]) -> u32 {
    let mut crc = crc32fast::Hasher::new();
    crc.update(&revision.0.to_le_bytes());
    crc.update(payload);
    crc.finalize()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Vec<Event> {
        let stamps = Stamps {
            created: Revision(3),
            modified: Revision(7),
            version: 2,
            lease: LeaseId::new(-9),
        };
        let put = KeyValue::new(stamps, b"k", &[0, 255, 1]);
        let delete = Change::Delete { key: "gone".into(), cause: Cause::Expired };
        vec![
            Event { revision: Revision(7), change: Change::Put(put), previous: None, tag: 0 },
            Event { revision: Revision(7), change: delete, previous: None, tag: 200 },
        ]
    }

    fn read(revision: u64, row: &[u8]) -> Result<Vec<Event>, Damaged> {
        let mut events = Vec::new();
        decode(Revision(revision), row, |event| events.push(event)).map(|()| events)
    }

    #[test]
    fn a_row_comes_back_as_it_was_written() {
        let mut row = vec![9; 100];
        encode(Revision(7), &sample(), &mut row);
        assert_eq!(read(7, &row[100..]).unwrap(), sample());
    }

    #[test]
    fn any_flipped_bit_is_noticed() {
        let mut row = Vec::new();
        encode(Revision(7), &sample(), &mut row);
        for bit in 0..row.len() * 8 {
            row[bit / 8] ^= 1 << (bit % 8);
            assert!(read(7, &row).is_err(), "bit {bit}");
            row[bit / 8] ^= 1 << (bit % 8);
        }
        assert!(read(8, &row).is_err(), "a row under another revision is not that row");
        for len in 0..row.len() {
            assert!(read(7, &row[..len]).is_err(), "cut to {len}");
        }
    }
}
