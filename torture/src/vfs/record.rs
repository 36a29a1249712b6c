//! Remembers what is on the disk for sure, and what may be.
//!
//! Two things can be unsettled about a file: what is in it, and whether its name leads to it. So a
//! name is kept apart from the node (the inode) it leads to, each with its settled state and the
//! changes since. An [`Image`] picks a state for every name that a power cut could leave.

use std::collections::{BTreeMap, HashMap};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::{fmt, fs, io};

/// The piece of a write that reaches the disk as a whole.
const SECTOR: usize = 512;

/// A file's content, whatever its name; an inode number that is never used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Node(u64);

/// A call that changes a file.
#[derive(Debug, Clone, Copy)]
pub(super) enum Operation<'a> {
    Create {
        path: &'a Path,
    },
    Write {
        node: Node,
        offset: usize,
        bytes: &'a [u8],
    },
    Truncate {
        node: Node,
        length: usize,
    },
    /// `told` is how many failed syncs of the file the caller has heard of.
    Sync {
        node: Node,
        directory: bool,
        told: u64,
    },
    Delete {
        path: &'a Path,
        sync_directory: bool,
    },
}

/// All files of a disk.
#[derive(Debug, Default)]
pub(super) struct Record {
    names: BTreeMap<PathBuf, Name>,
    nodes: HashMap<Node, File>,
    nodes_made: u64,
}

/// What a name leads to: `settled` for sure, each of `since` perhaps, the last one as seen by programs.
#[derive(Debug)]
struct Name {
    settled: Option<Node>,
    since: Vec<Option<Node>>,
}

#[derive(Debug)]
struct File {
    content: Content,
    /// As seen by programs.
    length: usize,
    handles: usize,
    failed_syncs: u64,
}

/// `Arc`s throughout, so that a snapshot copies no file.
#[derive(Debug, Clone, Default)]
struct Content {
    durable: Arc<Vec<u8>>,
    pending: Vec<Change>,
}

#[derive(Debug, Clone)]
enum Change {
    Write { offset: usize, bytes: Arc<[u8]> },
    Truncate { length: usize },
}

impl Record {
    /// Takes note of a file the disk has not met yet. One that exists is durable.
    ///
    /// Must come before SQLite opens the file: closing a descriptor drops all locks of this process.
    pub(super) fn adopt(&mut self, path: &Path) -> io::Result<()> {
        if self.names.contains_key(path) {
            return Ok(());
        }
        let settled = match fs::read(path) {
            Ok(bytes) => Some(self.add(bytes)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(error),
        };
        self.names.insert(path.to_owned(), Name { settled, since: Vec::new() });
        Ok(())
    }

    pub(super) fn exists(&self, path: &Path) -> bool {
        self.names.get(path).and_then(Name::now).is_some()
    }

    /// Counts one more handle of the file.
    pub(super) fn open(&mut self, path: &Path) -> Node {
        let node = self.names.get(path).and_then(Name::now).unwrap_or_else(|| self.create(path));
        if let Some(file) = self.nodes.get_mut(&node) {
            file.handles += 1;
        }
        node
    }

    pub(super) fn close(&mut self, node: Node) {
        if let Some(file) = self.nodes.get_mut(&node) {
            file.handles -= 1;
        }
        self.forget_unreachable();
    }

    pub(super) fn apply(&mut self, operation: Operation<'_>) {
        match operation {
            Operation::Create { path } => {
                self.create(path);
            }
            Operation::Write { node, offset, bytes } => {
                if let Some(file) = self.nodes.get_mut(&node) {
                    file.length = file.length.max(offset + bytes.len());
                    file.content.pending.push(Change::Write { offset, bytes: bytes.into() });
                }
            }
            Operation::Truncate { node, length } => {
                if let Some(file) = self.nodes.get_mut(&node) {
                    file.length = length;
                    file.content.pending.push(Change::Truncate { length });
                }
            }
            Operation::Sync { node, directory, .. } => self.sync(node, directory),
            Operation::Delete { path, sync_directory } => {
                if let Some(name) = self.names.get_mut(path) {
                    name.since.push(None);
                }
                if sync_directory {
                    self.sync_directory(path.parent());
                }
            }
        }
    }

    /// The system reports a failed sync once per open file, then takes the pages for written. Half of
    /// them were.
    pub(super) fn sync_failed(&mut self, node: Node, rng: &mut fastrand::Rng) {
        if let Some(File { content, failed_syncs, .. }) = self.nodes.get_mut(&node) {
            tear(Arc::make_mut(&mut content.durable), &content.pending, rng);
            content.pending.clear();
            *failed_syncs += 1;
        }
    }

    /// How many syncs of the file failed so far.
    pub(super) fn failed_syncs(&self, node: Node) -> u64 {
        self.nodes.get(&node).map_or(0, |file| file.failed_syncs)
    }

    pub(super) fn used(&self) -> u64 {
        let nodes = self.names.values().filter_map(Name::now);
        nodes.filter_map(|node| self.nodes.get(&node)).map(|file| file.length as u64).sum()
    }

    /// How many bytes more a write would use.
    pub(super) fn growth(&self, operation: Operation<'_>) -> u64 {
        let Operation::Write { node, offset, bytes } = operation else {
            return 0;
        };
        let length = self.nodes.get(&node).map_or(0, |file| file.length);
        (offset + bytes.len()).saturating_sub(length) as u64
    }

    pub(super) fn snapshot(&self) -> Snapshot {
        let content = |node: &Option<Node>| Some(self.nodes.get(node.as_ref()?)?.content.clone());
        let files = self.names.iter().map(|(path, name)| Candidates {
            name: path.file_name().unwrap_or_default().to_owned(),
            states: std::iter::once(&name.settled).chain(&name.since).map(content).collect(),
        });
        Snapshot { files: files.collect() }
    }

    fn create(&mut self, path: &Path) -> Node {
        let node = self.add(Vec::new());
        let name =
            self.names.entry(path.to_owned()).or_insert(Name { settled: None, since: Vec::new() });
        name.since.push(Some(node));
        node
    }

    fn add(&mut self, bytes: Vec<u8>) -> Node {
        let node = Node(self.nodes_made);
        self.nodes_made += 1;
        let length = bytes.len();
        let content = Content { durable: Arc::new(bytes), pending: Vec::new() };
        self.nodes.insert(node, File { content, length, handles: 0, failed_syncs: 0 });
        node
    }

    fn sync(&mut self, node: Node, directory: bool) {
        let Some(File { content, .. }) = self.nodes.get_mut(&node) else {
            return;
        };
        let durable = Arc::make_mut(&mut content.durable);
        content.pending.drain(..).for_each(|change| change.apply(durable));

        let mut parent = None;
        for (path, name) in &mut self.names {
            if name.settled == Some(node) {
                parent = path.parent();
            } else if let Some(at) = name.since.iter().position(|now| *now == Some(node)) {
                name.settle(at + 1);
                parent = path.parent();
            }
        }
        if directory {
            let parent = parent.map(Path::to_owned);
            self.sync_directory(parent.as_deref());
        }
        self.forget_unreachable();
    }

    fn sync_directory(&mut self, directory: Option<&Path>) {
        for (path, name) in &mut self.names {
            if path.parent() == directory {
                name.settle(name.since.len());
            }
        }
        self.forget_unreachable();
    }

    /// Frees what neither a name nor a handle leads to.
    fn forget_unreachable(&mut self) {
        let Self { names, nodes, .. } = self;
        nodes.retain(|node, file| {
            file.handles > 0 || names.values().any(|name| name.may_lead_to(*node))
        });
    }
}

impl Name {
    fn now(&self) -> Option<Node> {
        self.since.last().copied().unwrap_or(self.settled)
    }

    fn may_lead_to(&self, node: Node) -> bool {
        self.settled == Some(node) || self.since.contains(&Some(node))
    }

    /// The first `steps` changes are on the disk for sure.
    fn settle(&mut self, steps: usize) {
        if let Some(last) = self.since.drain(..steps).next_back() {
            self.settled = last;
        }
    }
}

impl Change {
    fn apply(&self, file: &mut Vec<u8>) {
        match self {
            Self::Write { offset, bytes } => write(file, *offset, bytes),
            Self::Truncate { length } => file.resize(*length, 0),
        }
    }
}

fn write(file: &mut Vec<u8>, offset: usize, bytes: &[u8]) {
    let end = offset + bytes.len();
    if file.len() < end {
        file.resize(end, 0);
    }
    file[offset..end].copy_from_slice(bytes);
}

/// Applies half of the changes' sectors. A later one wins where both are kept, so every mix of older
/// and newer sectors can come out.
fn tear(file: &mut Vec<u8>, changes: &[Change], rng: &mut fastrand::Rng) {
    for change in changes {
        match change {
            Change::Write { offset, bytes } => {
                let (mut offset, mut rest) = (*offset, &bytes[..]);
                while !rest.is_empty() {
                    let (sector, after) = rest.split_at(rest.len().min(SECTOR - offset % SECTOR));
                    if rng.bool() {
                        write(file, offset, sector);
                    }
                    offset += sector.len();
                    rest = after;
                }
            }
            Change::Truncate { .. } => {
                if rng.bool() {
                    change.apply(file);
                }
            }
        }
    }
}

/// The disk at one moment.
#[derive(Debug)]
pub(super) struct Snapshot {
    files: Vec<Candidates>,
}

/// What a name may lead to, from the settled state to the one programs saw last.
#[derive(Debug)]
struct Candidates {
    name: OsString,
    states: Vec<Option<Content>>,
}

/// Builds [`Image`]s one by one, so that many of a large disk need little memory.
#[derive(Debug)]
pub struct Images {
    snapshot: Snapshot,
    rng: fastrand::Rng,
    left: usize,
}

impl Images {
    pub(super) fn new(snapshot: Snapshot, seed: u64, how_many: usize) -> Self {
        Self { snapshot, rng: fastrand::Rng::with_seed(seed), left: how_many }
    }
}

impl Iterator for Images {
    type Item = Image;

    fn next(&mut self) -> Option<Image> {
        self.left = self.left.checked_sub(1)?;
        let files = self.snapshot.files.iter().map(|file| Survivor::pick(file, &mut self.rng));
        Some(Image { files: files.collect() })
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.left, Some(self.left))
    }
}

impl ExactSizeIterator for Images {}

/// One directory that a power cut may leave behind. Displays as what became of each file.
#[derive(Debug, Clone)]
pub struct Image {
    files: Vec<Survivor>,
}

#[derive(Debug, Clone)]
struct Survivor {
    name: OsString,
    unsynced: Unsynced,
    bytes: Option<Vec<u8>>,
}

/// What survives of the changes since the last sync.
#[derive(Debug, Clone, Copy)]
enum Unsynced {
    Nothing,
    Beginning,
    Sectors,
    AllButOne,
    Everything,
}

impl Image {
    /// Writes the files into `dir`, which is made if need be and must be empty: a `-shm` left there
    /// would let SQLite skip the recovery.
    pub fn write_to(&self, dir: &Path) -> io::Result<()> {
        fs::create_dir_all(dir)?;
        if fs::read_dir(dir)?.next().is_some() {
            return Err(io::ErrorKind::DirectoryNotEmpty.into());
        }
        for file in &self.files {
            if let Some(bytes) = &file.bytes {
                fs::write(dir.join(&file.name), bytes)?;
            }
        }
        Ok(())
    }

    /// The content of the file called `name`, if it survived.
    pub fn file(&self, name: &str) -> Option<&[u8]> {
        self.files.iter().find(|file| file.name == name)?.bytes.as_deref()
    }
}

impl fmt::Display for Image {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, Survivor { name, unsynced, bytes }) in self.files.iter().enumerate() {
            let separator = if i == 0 { "" } else { ", " };
            write!(f, "{separator}{}: ", name.display())?;
            match bytes {
                Some(bytes) => write!(f, "{} bytes ({unsynced:?} unsynced)", bytes.len())?,
                None => write!(f, "absent")?,
            }
        }
        Ok(())
    }
}

impl Survivor {
    fn pick(file: &Candidates, rng: &mut fastrand::Rng) -> Self {
        let last = file.states.len() - 1;
        let (unsynced, state) = match rng.u8(..5) {
            0 => (Unsynced::Nothing, 0),
            1 => (Unsynced::Beginning, rng.usize(..=last)),
            2 => (Unsynced::Sectors, rng.usize(..=last)),
            3 => (Unsynced::AllButOne, last),
            _ => (Unsynced::Everything, last),
        };
        let bytes = file.states[state].as_ref().map(|content| content.after(unsynced, rng));
        Self { name: file.name.clone(), unsynced, bytes }
    }
}

impl Content {
    fn after(&self, unsynced: Unsynced, rng: &mut fastrand::Rng) -> Vec<u8> {
        let mut bytes = Vec::clone(&self.durable);
        let count = self.pending.len();
        let kept = match unsynced {
            Unsynced::Nothing => 0..0,
            Unsynced::Beginning => 0..rng.usize(..=count),
            Unsynced::Sectors => {
                tear(&mut bytes, &self.pending, rng);
                0..0
            }
            Unsynced::AllButOne | Unsynced::Everything => 0..count,
        };
        let lost = matches!(unsynced, Unsynced::AllButOne).then(|| rng.usize(..=count));
        for (number, change) in self.pending[kept].iter().enumerate() {
            if Some(number) != lost {
                change.apply(&mut bytes);
            }
        }
        bytes
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// Every content of `/a` that a power cut can leave.
    fn outcomes(record: &Record) -> BTreeSet<Option<Vec<u8>>> {
        let images = Images::new(record.snapshot(), 7, 400);
        images.map(|image| image.file("a").map(<[u8]>::to_vec)).collect()
    }

    fn expect(record: &Record, contents: &[Option<&str>]) {
        let contents = contents.iter().map(|content| content.map(Into::into));
        assert_eq!(outcomes(record), contents.collect());
    }

    fn create(record: &mut Record, path: &str, content: &str) -> Node {
        let node = record.open(path.as_ref());
        record.apply(Operation::Write { node, offset: 0, bytes: content.as_bytes() });
        node
    }

    fn sync(record: &mut Record, node: Node, directory: bool) {
        record.apply(Operation::Sync { node, directory, told: 0 });
    }

    fn delete(record: &mut Record, sync_directory: bool) {
        record.apply(Operation::Delete { path: "/a".as_ref(), sync_directory });
    }

    #[test]
    fn a_file_may_be_missing_until_it_is_synced() {
        let mut record = Record::default();
        let node = create(&mut record, "/a", "one");
        expect(&record, &[None, Some(""), Some("one")]);
        sync(&mut record, node, false);
        expect(&record, &[Some("one")]);
    }

    #[test]
    fn a_deleted_file_may_be_back_until_the_directory_is_synced() {
        let mut record = Record::default();
        let node = create(&mut record, "/a", "one");
        sync(&mut record, node, false);
        record.close(node);
        delete(&mut record, false);
        expect(&record, &[None, Some("one")]);

        let new = create(&mut record, "/a", "two");
        expect(&record, &[None, Some(""), Some("one"), Some("two")]);
        sync(&mut record, new, false);
        expect(&record, &[Some("two")]);

        delete(&mut record, true);
        expect(&record, &[None]);
    }

    #[test]
    fn a_sync_of_the_directory_settles_the_names_of_its_other_files() {
        let mut record = Record::default();
        create(&mut record, "/a", "one");
        create(&mut record, "/other/b", "elsewhere");
        let neighbour = create(&mut record, "/c", "three");
        sync(&mut record, neighbour, true);
        expect(&record, &[Some(""), Some("one")]); // it exists, but nobody synced what is in it
        assert!(record.names[Path::new("/other/b")].settled.is_none());
    }

    #[test]
    fn what_a_failed_sync_dropped_stays_dropped() {
        let mut record = Record::default();
        let node = create(&mut record, "/a", "old");
        sync(&mut record, node, false);
        let mut fates = BTreeSet::new();
        for seed in 0..20 {
            record.apply(Operation::Write { node, offset: 0, bytes: b"old" });
            sync(&mut record, node, false);
            record.apply(Operation::Write { node, offset: 0, bytes: b"new" });
            record.sync_failed(node, &mut fastrand::Rng::with_seed(seed));
            sync(&mut record, node, false);
            fates.extend(outcomes(&record));
        }
        assert_eq!(fates, BTreeSet::from([Some(b"old".to_vec()), Some(b"new".to_vec())]));
    }

    #[test]
    fn writes_tear_at_the_sectors_of_the_file() {
        let mut torn = BTreeSet::new();
        for seed in 0..40 {
            let mut file = vec![b'-'; 1024];
            let write = Change::Write { offset: 510, bytes: (*b"abcd").into() };
            tear(&mut file, &[write], &mut fastrand::Rng::with_seed(seed));
            torn.insert(String::from_utf8_lossy(&file[510..514]).into_owned());
        }
        assert_eq!(torn, ["----", "--cd", "ab--", "abcd"].map(String::from).into());
    }

    #[test]
    fn nothing_is_kept_of_files_that_cannot_come_back() {
        let mut record = Record::default();
        for _ in 0..100 {
            let node = create(&mut record, "/a", "one");
            sync(&mut record, node, true);
            record.close(node);
            delete(&mut record, false);
        }
        assert_eq!(record.nodes.len(), 1);
        assert_eq!(record.used(), 0);
    }
}
