//! Paths of v2, and the keys they stand for.

use bytes::Bytes;
use vedetta_core::KeyRange;

/// Segments of the longest path. Whoever lists a directory repeats the path at every level, so there must be
/// an end.
const DEEPEST: usize = 512;

/// Where a node is: `/a/b`, or nothing at all for the root. No segment is empty, `.` or `..`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Path(Bytes);

impl Path {
    /// The path after its detours: double slashes, `.` and `..`.
    pub(crate) fn clean(raw: &[u8]) -> Self {
        let mut segments: Vec<&[u8]> = Vec::new();
        for segment in raw.split(|&byte| byte == b'/') {
            match segment {
                b"" | b"." => {}
                b".." => drop(segments.pop()),
                segment => segments.push(segment),
            }
        }
        let mut path = Vec::with_capacity(raw.len() + 1);
        for segment in segments {
            path.push(b'/');
            path.extend_from_slice(segment);
        }
        Self(path.into())
    }

    /// The node that a key stands for, and whether that makes it a directory; `None` when v2 has no name
    /// for it.
    pub(crate) fn of_key(key: &[u8]) -> Option<(Self, bool)> {
        let (path, dir) = match key.strip_suffix(b"/") {
            Some(path) => (path, true),
            None => (key, false),
        };
        let rest = path.strip_prefix(b"/")?;
        let named = rest.split(|&byte| byte == b'/').all(is_name);
        let path = Self(Bytes::copy_from_slice(path));
        (named && !is_too_deep(path.depth())).then_some((path, dir))
    }

    pub(crate) fn is_root(&self) -> bool {
        self.0.is_empty()
    }

    /// How many names it has; the root has none.
    pub(crate) fn depth(&self) -> usize {
        self.0.split(|&byte| byte == b'/').skip(1).count()
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// The key of a file here.
    pub(crate) fn file(&self) -> Bytes {
        self.0.clone()
    }

    /// The key that says that here is a directory.
    pub(crate) fn marker(&self) -> Bytes {
        [&self.0[..], b"/"].concat().into()
    }

    /// The marker and all keys in this directory, at any depth. The marker is the first.
    pub(crate) fn below(&self) -> KeyRange {
        KeyRange::prefix(self.marker())
    }

    /// The same without the marker.
    pub(crate) fn inside(&self) -> KeyRange {
        match self.below() {
            KeyRange::Between(marker, end) => {
                KeyRange::Between([&marker[..], b"\0"].concat().into(), end)
            }
            other => other, // there is none: a prefix that ends in a slash ends somewhere
        }
    }

    pub(crate) fn child(&self, name: &str) -> Self {
        Self([&self.0[..], b"/", name.as_bytes()].concat().into())
    }

    /// The directories it is in, from the top, without the root.
    pub(crate) fn ancestors(&self) -> impl Iterator<Item = Self> {
        let slashes = self.0.iter().enumerate().skip(1).filter(|(_, byte)| **byte == b'/');
        slashes.map(|(at, _)| Self(self.0.slice(..at)))
    }

    /// Their markers. They share the path's bytes.
    pub(crate) fn markers_above(&self) -> impl Iterator<Item = Bytes> {
        self.ancestors().map(|above| self.0.slice(..=above.0.len()))
    }

    /// What follows in `other` when that is somewhere below this.
    pub(crate) fn rest_of<'a>(&self, other: &'a Self) -> Option<&'a [u8]> {
        other.0.strip_prefix(&self.0[..])?.strip_prefix(b"/")
    }
}

/// Whether a segment can be the name of a node.
pub(crate) fn is_name(segment: &[u8]) -> bool {
    !matches!(segment, b"" | b"." | b"..")
}

/// Whether a path of so many names is one too many to be a node's.
pub(crate) fn is_too_deep(depth: usize) -> bool {
    depth > DEEPEST
}

/// Names that begin so are left out unless asked for.
pub(crate) fn is_hidden(segment: &[u8]) -> bool {
    segment.starts_with(b"_")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_cleaned_as_go_does() {
        for (raw, clean) in [
            ("", ""),
            ("/", ""),
            ("/a/", "/a"),
            ("//a//b", "/a/b"),
            ("/a/./b/..", "/a"),
            ("/../../a", "/a"),
            ("/a/...", "/a/..."),
        ] {
            assert_eq!(Path::clean(raw.as_bytes()).bytes(), clean.as_bytes(), "{raw}");
        }
    }

    #[test]
    fn only_keys_with_a_name_are_nodes() {
        let of = |key: &str| {
            let (path, dir) = Path::of_key(key.as_bytes())?;
            Some((String::from_utf8_lossy(path.bytes()).into_owned(), dir))
        };
        assert_eq!(of("/a/b"), Some(("/a/b".into(), false)));
        assert_eq!(of("/a/b/"), Some(("/a/b".into(), true)));
        for key in ["a", "", "/", "//", "/a//b", "/a//", "/a/./b", "/..", "/a/../"] {
            assert_eq!(of(key), None, "{key}");
        }
        assert!(of(&"/a".repeat(DEEPEST)).is_some());
        assert!(of(&"/a".repeat(DEEPEST + 1)).is_none());
    }

    #[test]
    fn what_is_inside_is_all_below_but_the_marker() {
        let inside = Path::clean(b"/a").inside();
        for (key, is) in
            [("/a/", false), ("/a/\0", true), ("/a/b/c", true), ("/a", false), ("/a0", false)]
        {
            assert_eq!(inside.contains(key.as_bytes()), is, "{key}");
        }
    }

    #[test]
    fn ancestors_come_from_the_top() {
        let path = Path::clean(b"/a/b/c");
        let all: Vec<_> = path.ancestors().map(|above| above.marker()).collect();
        assert_eq!(all, ["/a/", "/a/b/"]);
        assert_eq!(path.markers_above().collect::<Vec<_>>(), all);
        assert_eq!(Path::clean(b"/a").ancestors().count(), 0);
        assert_eq!(Path::clean(b"").ancestors().count(), 0);
        assert_eq!(Path::clean(b"/a").rest_of(&path), Some(&b"b/c"[..]));
        assert_eq!(Path::clean(b"").rest_of(&path), Some(&b"a/b/c"[..]));
        assert_eq!(Path::clean(b"/a/b").rest_of(&Path::clean(b"/a/bc")), None);
    }
}
