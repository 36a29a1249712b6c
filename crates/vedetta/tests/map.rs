//! A link in the repository's own pages leads somewhere: the file it names is there.

mod tree;

use std::path::{Component, Path, PathBuf};

#[test]
fn links_between_the_pages_lead_to_files_that_exist() {
    let root = tree::root();
    let mut faults = Vec::new();
    for (page, text) in tree::files("md") {
        faults.extend(broken_links(&page, &text, |path| root.join(path).exists()));
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

/// The links of a page to files that do not exist or lie outside of the repository.
fn broken_links(page: &Path, text: &str, exists: impl Fn(&Path) -> bool) -> Vec<String> {
    let folder = page.parent().unwrap_or(Path::new(""));
    let relative = links(text).into_iter().filter(|target| !leads_elsewhere(target));
    let broken = relative.filter(|target| {
        let file = target.split('#').next().unwrap_or_default();
        inside(&folder.join(file)).is_none_or(|path| !exists(&path))
    });
    broken.map(|target| format!("{}: {target}", page.display())).collect()
}

/// A place on this page, or an address with a scheme.
fn leads_elsewhere(target: &str) -> bool {
    let scheme = target.split_once(':').map_or("", |(scheme, _)| scheme);
    target.starts_with('#')
        || (!scheme.is_empty() && scheme.chars().all(|c| c.is_ascii_alphabetic()))
}

/// The path without its `.` and `..`, unless it leaves the repository.
fn inside(path: &Path) -> Option<PathBuf> {
    let mut clean = PathBuf::new();
    for part in path.components() {
        match part {
            Component::Normal(name) => clean.push(name),
            Component::CurDir => {}
            Component::ParentDir => {
                if !clean.pop() {
                    return None;
                }
            }
            Component::RootDir | Component::Prefix(_) => return None,
        }
    }
    Some(clean)
}

/// The targets of the links in a page: `](target)` and `[name]: target`, not in code.
fn links(text: &str) -> Vec<&str> {
    let mut found = Vec::new();
    let mut in_block = false;
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            in_block = !in_block;
            continue;
        }
        if in_block {
            continue;
        }
        if let Some((_, target)) = line.strip_prefix('[').and_then(|rest| rest.split_once("]: ")) {
            found.push(first_word(target));
        }
        for (at, _) in line.match_indices("](") {
            let in_code = line[..at].matches('`').count() % 2 == 1;
            let target = &line[at + 2..];
            if !in_code {
                found.push(first_word(target.split(')').next().unwrap_or_default()));
            }
        }
    }
    found
}

/// The target without the title that may follow it.
fn first_word(target: &str) -> &str {
    target.split_whitespace().next().unwrap_or_default()
}

#[test]
fn a_link_to_a_file_that_is_not_there_is_a_fault() {
    let text = "See [one](adr/one.md), [two](adr/two.md#choice) and [`map`](../ARCHITECTURE.md \"the map\").\n\
        [three]: adr/three.md\n[out](../../outside.md) [root](/etc/passwd)\n";
    let there = ["docs/adr/one.md", "docs/adr/two.md"].map(PathBuf::from);
    assert_eq!(
        broken_links(Path::new("docs/page.md"), text, |path| there.contains(&path.to_path_buf())),
        [
            "docs/page.md: ../ARCHITECTURE.md",
            "docs/page.md: adr/three.md",
            "docs/page.md: ../../outside.md",
            "docs/page.md: /etc/passwd",
        ]
    );
}

#[test]
fn addresses_places_on_the_page_and_code_are_not_files() {
    let text = "[web](https://example.org/a) [mail](mailto:a@example.org) [here](#choice) `[a](gone.md) [b](gone.md)`\n\
        ```text\n[block](gone.md)\n```\n";
    assert_eq!(broken_links(Path::new("a.md"), text, |_| false), Vec::<String>::new());
}
