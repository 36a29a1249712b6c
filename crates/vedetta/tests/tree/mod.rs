//! The files of this repository, as the tests that check it as a whole see them.

use std::fs;
use std::path::{Path, PathBuf};

/// The folder that holds the workspace.
pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../..")
        .canonicalize()
        .expect("the workspace is two folders above this crate")
}

/// Every file of the repository with this extension, as its path from the root and its text.
/// Built files (`target`) and hidden folders are not part of it.
pub(crate) fn files(extension: &str) -> Vec<(PathBuf, String)> {
    let root = root();
    let mut found = Vec::new();
    let mut folders = vec![root.clone()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).expect("a readable folder") {
            let entry = entry.expect("a readable folder");
            let path = entry.path();
            let name = entry.file_name();
            let name = name.to_string_lossy();
            // A link is not followed: it could lead out of the repository or round in circles.
            let kind = entry.file_type().expect("a file has a type");
            if kind.is_dir() {
                if name != "target" && name != "vedetta-data" && !name.starts_with('.') {
                    folders.push(path);
                }
            } else if kind.is_file() && path.extension().is_some_and(|found| found == extension) {
                let text = fs::read_to_string(&path).unwrap_or_else(|error| {
                    panic!("{} is not readable text: {error}", path.display())
                });
                let from_root = path.strip_prefix(&root).expect("found under the root");
                found.push((from_root.to_path_buf(), text));
            }
        }
    }
    found.sort();
    found
}
