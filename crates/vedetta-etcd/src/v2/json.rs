//! JSON as Go writes it: the same order, the same escapes.

use std::io::Write as _;

use bytes::Bytes;
use vedetta_kv::KeyValue;

use super::path::{Path, is_hidden, is_name, is_too_deep};
use super::ttl::Expiry;

/// What happened to a node, or what it is.
#[derive(Debug)]
pub(crate) struct Event {
    pub(crate) action: &'static str,
    pub(crate) node: Node,
    pub(crate) previous: Option<Node>,
}

/// A node without what is in it.
#[derive(Debug, Clone)]
pub(crate) struct Node {
    pub(crate) path: Path,
    /// The key whose value to show; a directory has none, nor has a node that is gone.
    pub(crate) value: Option<KeyValue>,
    pub(crate) dir: bool,
    pub(crate) expiry: Option<Expiry>,
    pub(crate) modified: u64,
    pub(crate) created: u64,
}

impl Event {
    /// One line.
    pub(crate) fn line(&self) -> Bytes {
        let mut out = format!("{{\"action\":\"{}\",\"node\":", self.action).into_bytes();
        self.node.write(&mut out);
        if let Some(previous) = &self.previous {
            out.extend_from_slice(b",\"prevNode\":");
            previous.write(&mut out);
        }
        out.extend_from_slice(b"}\n");
        out.into()
    }
}

impl Node {
    fn write(&self, out: &mut Vec<u8>) {
        out.push(b'{');
        let mut fields = Fields { out, any: false };
        head(&mut fields, self.path.bytes(), self.value.as_ref(), self.dir, self.expiry);
        indexes(&mut fields, self.modified, self.created);
        out.push(b'}');
    }
}

/// A directory with what is in it.
///
/// `keys` are all keys below it, in order, or at least the first of each node to be shown. With `deep`,
/// directories in it are shown with what is in them, at any depth. The expiry of a key is asked for.
pub(crate) fn listing(
    node: &Node,
    mut keys: Vec<KeyValue>,
    deep: bool,
    expiry: impl Fn(&KeyValue) -> Option<Expiry>,
) -> Vec<u8> {
    // In the order of the tree: a directory's content right after it.
    let rank = |byte: u8| if byte == b'/' { 0 } else { u16::from(byte) + 1 };
    keys.sort_by(|a, b| {
        let (a, b) = (a.key().iter().copied().map(rank), b.key().iter().copied().map(rank));
        a.cmp(b)
    });
    let mut out = b"{\"action\":\"get\",\"node\":{".to_vec();
    let mut fields = Fields { out: &mut out, any: false };
    head(&mut fields, node.path.bytes(), None, true, node.expiry);
    let any = fields.any;
    let mut open =
        vec![Open { length: node.path.bytes().len(), any, children: false, created: node.created }];
    let (top, depth) = (node.path.bytes().len() + 1, node.path.depth());
    let mut previous: &[u8] = &[];
    for (place, key) in keys.iter().enumerate() {
        let name = key.key();
        if name.len() <= top {
            continue; // the directory's own marker
        }
        // Close what this key is not in.
        let common = shared(previous, name);
        while open.len() > 1 && open.last().is_some_and(|dir| dir.length >= common) {
            close(&mut out, &mut open);
        }
        previous = name;
        let next = keys.get(place + 1).map(KeyValue::key);
        let mut start = open.last().map_or(top, |dir| dir.length + 1);
        while (deep || open.len() == 1) && !is_too_deep(depth + open.len()) {
            let end = name[start..].iter().position(|&byte| byte == b'/').map(|at| start + at);
            let segment = &name[start..end.unwrap_or(name.len())];
            if !is_name(segment) || is_hidden(segment) {
                break;
            }
            let Some(end) = end else {
                let shadowed = next.is_some_and(|next| {
                    next.strip_prefix(name).is_some_and(|rest| rest.starts_with(b"/"))
                });
                if !shadowed {
                    begin(&mut out, &mut open);
                    let mut fields = Fields { out: &mut out, any: false };
                    head(&mut fields, name, Some(key), false, expiry(key));
                    indexes(&mut fields, key.modified().0, key.created().0);
                    out.push(b'}');
                }
                break;
            };
            begin(&mut out, &mut open);
            let marker = end + 1 == name.len();
            let mut fields = Fields { out: &mut out, any: false };
            head(&mut fields, &name[..end], None, true, expiry(key).filter(|_| marker));
            open.push(Open { length: end, any: true, children: false, created: key.created().0 });
            start = end + 1;
            if marker {
                break;
            }
        }
    }
    while !open.is_empty() {
        close(&mut out, &mut open);
    }
    out.extend_from_slice(b"}\n");
    out
}

/// A directory being written. A stack of these and not recursion: paths can be very deep.
struct Open {
    /// How long its path is.
    length: usize,
    /// Whether it has a field already.
    any: bool,
    children: bool,
    created: u64,
}

/// How long the path of the deepest directory is that two keys are both in.
fn shared(a: &[u8], b: &[u8]) -> usize {
    let same = a.iter().zip(b).take_while(|(a, b)| a == b).count();
    a[..same].iter().rposition(|&byte| byte == b'/').map_or(0, |at| at + 1)
}

fn begin(out: &mut Vec<u8>, open: &mut [Open]) {
    let Some(parent) = open.last_mut() else { return };
    if parent.children {
        out.push(b',');
    } else {
        if parent.any {
            out.push(b',');
        }
        out.extend_from_slice(b"\"nodes\":[");
    }
    (parent.children, parent.any) = (true, true);
    out.push(b'{');
}

fn close(out: &mut Vec<u8>, open: &mut Vec<Open>) {
    let Some(dir) = open.pop() else { return };
    if dir.children {
        out.push(b']');
    }
    indexes(&mut Fields { out, any: dir.any }, dir.created, dir.created);
    out.push(b'}');
}

/// The fields of an object so far.
struct Fields<'a> {
    out: &'a mut Vec<u8>,
    any: bool,
}

impl Fields<'_> {
    fn name(&mut self, name: &str) -> &mut Vec<u8> {
        if self.any {
            self.out.push(b',');
        }
        self.any = true;
        let _ = write!(self.out, "\"{name}\":"); // a Vec takes everything
        self.out
    }
}

fn head(
    fields: &mut Fields<'_>,
    path: &[u8],
    value: Option<&KeyValue>,
    dir: bool,
    expiry: Option<Expiry>,
) {
    if !path.is_empty() {
        string(fields.name("key"), path);
    }
    if let Some(value) = value {
        string(fields.name("value"), value.value());
    }
    if dir {
        fields.name("dir").extend_from_slice(b"true");
    }
    if let Some(expiry) = expiry {
        string(fields.name("expiration"), expiry.timestamp().as_bytes());
        if expiry.ttl != 0 {
            let _ = write!(fields.name("ttl"), "{}", expiry.ttl);
        }
    }
}

fn indexes(fields: &mut Fields<'_>, modified: u64, created: u64) {
    for (name, index) in [("modifiedIndex", modified), ("createdIndex", created)] {
        if index != 0 {
            let _ = write!(fields.name(name), "{index}");
        }
    }
}

/// A string. What is not UTF-8 becomes the replacement character; what could end a script in a page is
/// escaped.
pub(crate) fn string(out: &mut Vec<u8>, bytes: &[u8]) {
    out.push(b'"');
    for chunk in bytes.utf8_chunks() {
        for character in chunk.valid().chars() {
            match character {
                '"' => out.extend_from_slice(b"\\\""),
                '\\' => out.extend_from_slice(b"\\\\"),
                '\n' => out.extend_from_slice(b"\\n"),
                '\r' => out.extend_from_slice(b"\\r"),
                '\t' => out.extend_from_slice(b"\\t"),
                '\0'..='\x1f' | '<' | '>' | '&' | '\u{2028}' | '\u{2029}' => {
                    let _ = write!(out, "\\u{:04x}", u32::from(character));
                }
                other => out.extend_from_slice(other.encode_utf8(&mut [0; 4]).as_bytes()),
            }
        }
        for _ in chunk.invalid() {
            out.extend_from_slice(b"\\ufffd");
        }
    }
    out.push(b'"');
}

#[cfg(test)]
mod tests {
    use vedetta_core::Revision;
    use vedetta_kv::Stamps;

    use super::*;

    #[test]
    fn strings_are_escaped_as_go_does() {
        for (raw, expected) in [
            (&b"plain /\x7f"[..], "\"plain /\x7f\""),
            (b"\"\\\n\r\t", r#""\"\\\n\r\t""#),
            (b"\0\x08\x0c\x1f", r#""\u0000\u0008\u000c\u001f""#),
            (b"<a>&", r#""\u003ca\u003e\u0026""#),
            ("é\u{2028}\u{2029}\u{1f600}".as_bytes(), "\"é\\u2028\\u2029\u{1f600}\""),
            // Go takes invalid bytes one by one.
            (b"\xff\xe2\x80x", r#""\ufffd\ufffd\ufffdx""#),
        ] {
            let mut out = Vec::new();
            string(&mut out, raw);
            assert_eq!(String::from_utf8(out).unwrap(), expected);
        }
    }

    fn key(name: &str, at: u64) -> KeyValue {
        let stamps =
            Stamps { created: Revision(at), modified: Revision(at), version: 1, lease: None };
        KeyValue::new(stamps, name.as_bytes(), b"v")
    }

    fn list(path: &str, names: &[&str], deep: bool) -> String {
        let keys = (1..).zip(names).map(|(at, name)| key(name, at)).collect();
        let path = Path::clean(path.as_bytes());
        let node = Node { path, value: None, dir: true, expiry: None, modified: 0, created: 0 };
        let out = String::from_utf8(listing(&node, keys, deep, |_| None)).unwrap();
        let out = out.strip_prefix("{\"action\":\"get\",\"node\":").unwrap();
        let out = out.strip_suffix("}\n").unwrap();
        serde_json::from_str::<serde_json::Value>(out).expect("it is JSON");
        let short = out.replace("\"value\":\"v\",", "").replace("\"modifiedIndex\":", "");
        let short = short.replace("\"createdIndex\":", "").replace("\"key\":", "");
        short.replace('"', "")
    }

    #[test]
    fn a_listing_is_a_tree() {
        assert_eq!(list("", &[], true), "{dir:true}");
        assert_eq!(list("", &["/a"], true), "{dir:true,nodes:[{/a,1,1}]}");
        assert_eq!(
            list("", &["/a/", "/a-", "/a/b", "/a/c/", "/a/c/d", "/b"], true),
            "{dir:true,nodes:[{/a,dir:true,nodes:[{/a/b,3,3},{/a/c,dir:true,nodes:[{/a/c/d,5,5}],4,4}],1,1},\
             {/a-,2,2},{/b,6,6}]}"
        );
        assert_eq!(
            list("/x", &["/x/", "/x/a/b/c", "/x/d"], true),
            "{/x,dir:true,nodes:[{/x/a,dir:true,nodes:[{/x/a/b,dir:true,nodes:[{/x/a/b/c,2,2}],2,2}],2,2},\
             {/x/d,3,3}]}"
        );
        assert_eq!(
            list("/x", &["/x/", "/x/a/b/c", "/x/a/e", "/x/d"], false),
            "{/x,dir:true,nodes:[{/x/a,dir:true,2,2},{/x/d,4,4}]}"
        );
    }

    #[test]
    fn a_listing_leaves_out_the_hidden_the_nameless_and_values_of_directories() {
        assert_eq!(
            list("", &["/_h", "/a/_h/x", "/a/_h/y", "/a/z", "/b//x", "/c", "/c/d"], true),
            "{dir:true,nodes:[{/a,dir:true,nodes:[{/a/z,4,4}],2,2},{/b,dir:true,5,5},\
             {/c,dir:true,nodes:[{/c/d,7,7}],7,7}]}"
        );
        assert_eq!(list("/_h", &["/_h/", "/_h/x"], false), "{/_h,dir:true,nodes:[{/_h/x,2,2}]}");
        assert_eq!(
            list("", &["/", "/a/../b", "/x"], true),
            "{dir:true,nodes:[{/a,dir:true,2,2},{/x,3,3}]}"
        );
    }

    #[test]
    fn a_very_deep_path_is_listed_too() {
        let deep = "/a".repeat(30_000);
        let keys = vec![key(&deep, 1)];
        let path = Path::clean(b"");
        let node = Node { path, value: None, dir: true, expiry: None, modified: 0, created: 0 };
        let listed = listing(&node, keys, true, |_| None);
        assert!(listed.len() < 1 << 20, "every level repeats the path, so there is an end");
    }
}
