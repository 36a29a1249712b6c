//! `docs/requirements.md` names the tests that show each requirement. This test keeps it honest: every
//! id is there once, every named test exists, and a part that is finished owes nothing.

mod tree;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path};

/// The parts whose requirements must all be shown. A part is added here when it is finished.
const FINISHED_PARTS: &[u32] = &[1, 2, 3, 4, 5, 6, 7];

/// How many parts there are.
const PARTS: u32 = 7;

/// Each family of requirements: its letter, how many it numbers, and how many go beyond them.
const FAMILIES: [(char, u32, u32); 5] =
    [('W', 11, 7), ('S', 13, 5), ('E', 7, 4), ('P', 7, 5), ('T', 10, 6)];

/// Packages whose tests `./test` leaves out.
const NEVER_RUN: [&str; 1] = ["bench"];

/// What a row says instead of tests while its part has not been built.
const NOT_YET_DUE: &str = "not yet due";

#[test]
fn the_requirements_are_all_listed_and_shown_by_tests_that_exist() {
    let page = std::fs::read_to_string(tree::root().join("docs/requirements.md"))
        .expect("docs/requirements.md");
    let mut tests = Tests::default();
    for (path, source) in tree::files("rs") {
        tests.add(&package_of(&path), &source);
    }

    let (rows, mut faults) = read_rows(&page);
    faults.extend(wrong_ids(&rows, &wanted_ids()));
    faults.extend(missing_tests(&rows, &tests));
    faults.extend(owed_rows(&rows, FINISHED_PARTS));
    assert!(faults.is_empty(), "docs/requirements.md:\n  {}", faults.join("\n  "));
}

/// One line of the table.
#[derive(Debug, PartialEq)]
struct Row {
    id: String,
    /// The parts that each show their share of it.
    due: Vec<u32>,
    /// The tests named, as written: `name` or `package::name`.
    shown_by: Vec<String>,
}

/// The tests of the workspace, by name, each with the packages that have one of that name.
#[derive(Debug, Default)]
struct Tests(BTreeMap<String, BTreeSet<String>>);

impl Tests {
    fn add(&mut self, package: &str, source: &str) {
        if NEVER_RUN.contains(&package) {
            return;
        }
        for name in test_names(source) {
            self.0.entry(name).or_default().insert(package.to_owned());
        }
    }

    /// Whether the test exists, in the package if the name says one.
    fn has(&self, named: &str) -> bool {
        match named.split_once("::") {
            None => self.0.contains_key(named),
            Some((package, name)) => self
                .0
                .get(name)
                .is_some_and(|packages| packages.contains(&package.replace('_', "-"))),
        }
    }
}

/// Every id that must have its row.
fn wanted_ids() -> Vec<String> {
    let mut ids = Vec::new();
    for (family, numbered, beyond) in FAMILIES {
        ids.extend((1..=numbered).map(|number| format!("{family}{number}")));
        ids.extend((1..=beyond).map(|number| format!("{family}-beyond-{number}")));
    }
    ids
}

/// The rows of every table in the page, and what is wrong with those that can not be understood.
fn read_rows(page: &str) -> (Vec<Row>, Vec<String>) {
    let mut rows = Vec::new();
    let mut faults = Vec::new();
    for line in page.lines() {
        let Some(inner) = line.trim().strip_prefix('|').and_then(|rest| rest.strip_suffix('|'))
        else {
            continue;
        };
        let cells: Vec<&str> = inner.split('|').map(str::trim).collect();
        let heading = cells[0] == "id" || cells[0].chars().all(|c| matches!(c, '-' | ':'));
        if heading {
            continue;
        }
        match read_row(&cells) {
            Ok(row) => rows.push(row),
            Err(fault) => faults.push(format!("{}: {fault}", cells[0])),
        }
    }
    (rows, faults)
}

fn read_row(cells: &[&str]) -> Result<Row, String> {
    let &[id, what, due, shown_by] = cells else {
        return Err(format!("{} columns, expected id, what, due, shown by", cells.len()));
    };
    if what.is_empty() {
        return Err("says nothing of what is required".to_owned());
    }
    let due = due
        .split(',')
        .map(|part| part.trim().parse().ok().filter(|part| (1..=PARTS).contains(part)))
        .collect::<Option<Vec<u32>>>()
        .ok_or_else(|| {
            format!("due in `{due}`, expected parts between 1 and {PARTS}, such as `1, 2`")
        })?;
    // Names stand between backticks, so they are every second piece.
    let names: Vec<String> = shown_by.split('`').skip(1).step_by(2).map(str::to_owned).collect();
    if names.is_empty() != (shown_by == NOT_YET_DUE) {
        return Err(format!(
            "`{shown_by}`: expected test names in backticks or else `{NOT_YET_DUE}`"
        ));
    }
    Ok(Row { id: id.to_owned(), due, shown_by: names })
}

fn wrong_ids(rows: &[Row], wanted: &[String]) -> Vec<String> {
    let mut faults = Vec::new();
    for id in wanted {
        match rows.iter().filter(|row| row.id == *id).count() {
            0 => faults.push(format!("{id}: missing")),
            1 => {}
            times => faults.push(format!("{id}: listed {times} times")),
        }
    }
    let unknown = rows.iter().filter(|row| !wanted.contains(&row.id));
    faults.extend(unknown.map(|row| format!("{}: no such requirement", row.id)));
    faults
}

fn missing_tests(rows: &[Row], tests: &Tests) -> Vec<String> {
    let named = rows.iter().flat_map(|row| row.shown_by.iter().map(move |name| (&row.id, name)));
    named
        .filter(|(_, name)| !tests.has(name))
        .map(|(id, name)| format!("{id}: there is no test `{name}` that runs"))
        .collect()
}

fn owed_rows(rows: &[Row], finished: &[u32]) -> Vec<String> {
    rows.iter()
        .filter(|row| row.shown_by.is_empty())
        .filter_map(|row| {
            let part = row.due.iter().find(|part| finished.contains(part))?;
            Some(format!("{}: part {part} is finished and no test shows it", row.id))
        })
        .collect()
}

/// The package a source file belongs to: `crates/NAME/…`, `examples/NAME/…` or `NAME/…`.
fn package_of(path: &Path) -> String {
    let mut folders = path.components().filter_map(|part| match part {
        Component::Normal(name) => name.to_str(),
        _ => None,
    });
    match folders.next() {
        Some("crates" | "examples") => folders.next(),
        other => other,
    }
    .unwrap_or_default()
    .to_owned()
}

/// The names of the tests in a source file that run: those in `proptest!` included, and those in the list
/// of a `suite!` or `stories!`, one a line; those that are ignored or commented out not.
fn test_names(source: &str) -> Vec<String> {
    /// What stands above the line being read.
    enum Above {
        Nothing,
        Test { ignored: bool },
    }
    let mut above = Above::Nothing;
    let mut in_suite = false;
    let mut names = Vec::new();
    for line in source.lines().map(str::trim) {
        let begins = line.starts_with("suite! {") || line.starts_with("stories! {");
        in_suite = (in_suite && line != "};") || begins;
        let is_name = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
        if in_suite && !line.is_empty() && line.chars().all(is_name) {
            names.push(line.to_owned());
        }
        let starts_test = line.starts_with("#[test]") || line.starts_with("#[tokio::test");
        if starts_test {
            above = Above::Test {
                ignored: line.contains("#[ignore")
                    || matches!(above, Above::Test { ignored: true }),
            };
        } else if line.starts_with("#[ignore") {
            // Above or below `#[test]`: a test with this is never run.
            above = Above::Test { ignored: true };
        }
        if let Some(name) = function_name(line) {
            if let Above::Test { ignored: false } = above {
                names.push(name.to_owned());
            }
            above = Above::Nothing;
        }
    }
    names
}

/// The name of the function that a line begins, behind attributes on the same line.
fn function_name(line: &str) -> Option<&str> {
    let mut words = line;
    while words.starts_with("#[") {
        words = words.split_once(']')?.1.trim_start();
    }
    for prefix in ["pub ", "pub(crate) ", "async "] {
        words = words.strip_prefix(prefix).unwrap_or(words);
    }
    let rest = words.strip_prefix("fn ")?;
    let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_')?;
    Some(&rest[..end])
}

/// A row as the tables below write it.
fn row(id: &str, due: &[u32], shown_by: &[&str]) -> Row {
    Row {
        id: id.to_owned(),
        due: due.to_vec(),
        shown_by: shown_by.iter().copied().map(str::to_owned).collect(),
    }
}

#[test]
fn a_table_reads_as_rows() {
    let page = "# Title\n\n| id | what | due | shown by |\n|---|:--|---|---|\n\
        | E1 | watchers | 1, 2 | `a_test`, `kv::b_test` |\n| E7 | wire | 2 | not yet due |\n";
    let (rows, faults) = read_rows(page);
    assert_eq!(rows, [row("E1", &[1, 2], &["a_test", "kv::b_test"]), row("E7", &[2], &[])]);
    assert!(faults.is_empty(), "{faults:?}");
}

#[test]
fn a_row_that_can_not_be_understood_is_a_fault() {
    for bad in [
        "| E1 | what | 1 |",                    // a column short
        "| E1 | | 1 | `a` |",                   // says nothing
        "| E1 | what | soon | not yet due |",   // no part
        "| E1 | what | 8 | not yet due |",      // no such part
        "| E1 | what | 1 | |",                  // neither tests nor the marker
        "| E1 | what | 1 | later |",            // another marker
        "| E1 | what | 1 | not yet due |  | |", // columns too many
    ] {
        let (rows, faults) = read_rows(bad);
        assert!(rows.is_empty() && faults.len() == 1, "{bad}: {rows:?} {faults:?}");
        assert!(faults[0].starts_with("E1: "), "{faults:?}");
    }
}

#[test]
fn ids_that_are_missing_doubled_or_unknown_are_faults() {
    let wanted = ["E1", "E2", "E3"].map(str::to_owned);
    let rows =
        [row("E1", &[1], &[]), row("E1", &[1], &[]), row("E2", &[1], &[]), row("X1", &[1], &[])];
    assert_eq!(
        wrong_ids(&rows, &wanted),
        ["E1: listed 2 times", "E3: missing", "X1: no such requirement"]
    );
}

#[test]
fn a_named_test_that_does_not_exist_is_a_fault() {
    let mut tests = Tests::default();
    tests.add("vedetta-kv", "#[test]\nfn here() {}\nfn helper() {}");
    tests.add("bench", "#[test]\nfn never_run() {}");
    let names = [
        "here",
        "vedetta-kv::here",
        "vedetta_kv::here",
        "vedetta-db::here",
        "gone",
        "helper",
        "never_run",
    ];
    assert_eq!(
        missing_tests(&[row("E1", &[1], &names)], &tests),
        [
            "E1: there is no test `vedetta-db::here` that runs",
            "E1: there is no test `gone` that runs",
            "E1: there is no test `helper` that runs",
            "E1: there is no test `never_run` that runs",
        ]
    );
}

#[test]
fn a_row_without_tests_is_a_fault_once_one_of_its_parts_is_finished() {
    let rows = [row("E1", &[1, 2], &["shown"]), row("E2", &[1, 2], &[]), row("E7", &[2], &[])];
    assert!(owed_rows(&rows, &[]).is_empty());
    assert_eq!(owed_rows(&rows, &[1]), ["E2: part 1 is finished and no test shows it"]);
    assert_eq!(
        owed_rows(&rows, &[2]),
        [
            "E2: part 2 is finished and no test shows it",
            "E7: part 2 is finished and no test shows it",
        ]
    );
}

#[test]
fn only_functions_that_the_test_runner_runs_count_as_tests() {
    for (source, names) in [
        ("#[test]\nfn plain() {}", &["plain"][..]),
        ("    #[test]\n    #[should_panic(expected = \"no\")]\n    fn nested() {}", &["nested"]),
        ("#[tokio::test]\nasync fn waits() {}", &["waits"]),
        ("suite! { World;\n  flow {\n    it_flows\n    // off\n  }\n};\nother", &["it_flows"]),
        ("#[tokio::test(\n    start_paused = true,\n)]\nasync fn paused() {}", &["paused"]),
        ("#[test] fn short() {}", &["short"]),
        (
            "proptest! {\n    /// Why.\n    #[test]\n    fn agrees(ops in any::<u8>()) {}\n}",
            &["agrees"],
        ),
        ("#[test]\nfn first() {}\nfn helper() {}\n#[test]\nfn second() {}", &["first", "second"]),
        ("#[test]\n#[ignore = \"slow\"]\nfn left_out() {}", &[]),
        ("#[ignore]\n#[test]\nfn left_out() {}\n#[test]\nfn kept() {}", &["kept"]),
        ("// #[test]\nfn off() {}", &[]),
        ("fn helper() {}", &[]),
    ] {
        assert_eq!(test_names(source), names, "{source}");
    }
}

#[test]
fn a_file_belongs_to_the_package_of_its_folder() {
    assert_eq!(package_of(Path::new("crates/vedetta-kv/src/watch.rs")), "vedetta-kv");
    assert_eq!(package_of(Path::new("torture/tests/kill.rs")), "torture");
}
