//! `ARCHITECTURE.md` draws which crate may use which. This test holds the drawing against Cargo's own
//! view: an edge that is not drawn fails, and so does a drawn one that nobody uses.

mod tree;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

use serde_json::Value;

/// Each crate with the crates of the workspace that it uses.
type Edges = BTreeMap<String, BTreeSet<String>>;

/// They test and measure the others and are in no product: they may use what they like.
const TOOLS: [&str; 6] = ["bench", "live-rooms", "orders", "testing", "torture", "transcode"];

/// The programs in `examples`, which show what anybody can build with the library.
const EXAMPLES: [&str; 3] = ["live-rooms", "orders", "transcode"];

/// Features that plant faults for the tests, and must never be in the program.
const TEST_ONLY_FEATURES: [&str; 1] = ["torture"];

#[test]
fn crates_use_each_other_only_as_architecture_md_draws() {
    let metadata = metadata();
    let page =
        std::fs::read_to_string(tree::root().join("ARCHITECTURE.md")).expect("ARCHITECTURE.md");
    let drawn = drawn_edges(&page).unwrap_or_else(|fault| panic!("ARCHITECTURE.md: {fault}"));

    let mut faults = differences(&drawn, &real_edges(&metadata));
    faults.extend(wrong_folders(&drawn, &crate_folders()));
    assert!(faults.is_empty(), "ARCHITECTURE.md:\n  {}", faults.join("\n  "));
}

#[test]
fn no_crate_of_the_program_asks_for_a_test_only_feature() {
    let faults = test_only_features(&metadata());
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn examples_use_the_library_as_anybody_would() {
    let metadata = metadata();
    let members: BTreeSet<&str> =
        packages(&metadata).iter().map(|package| text(&package["name"])).collect();
    let examples: BTreeSet<&str> = packages(&metadata)
        .iter()
        .filter(|package| text(&package["manifest_path"]).contains("/examples/"))
        .map(|package| text(&package["name"]))
        .collect();
    assert_eq!(examples, BTreeSet::from(EXAMPLES), "the folders in `examples`");
    for package in packages(&metadata).iter().filter(|it| examples.contains(text(&it["name"]))) {
        let used = product_dependencies(package).map(|dependency| text(&dependency["name"]));
        let of_ours: Vec<&str> = used.filter(|name| members.contains(name)).collect();
        assert_eq!(of_ours, ["vedetta"], "{}", package["name"]);
    }
}

/// What Cargo says of the workspace.
fn metadata() -> Value {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args(["metadata", "--format-version", "1", "--no-deps", "--offline"])
        .current_dir(tree::root())
        .output()
        .expect("cargo can be run");
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "cargo metadata: {complaint}");
    serde_json::from_slice(&output.stdout).expect("cargo metadata is JSON")
}

/// The folders in `crates/` that hold a crate.
fn crate_folders() -> BTreeSet<String> {
    let manifests = tree::files("toml");
    let paths = manifests.iter().map(|(path, _)| path);
    paths.filter_map(|path| crate_folder(path)).collect()
}

fn crate_folder(manifest: &Path) -> Option<String> {
    let folder = manifest.strip_prefix("crates").ok()?.parent()?;
    let of_a_crate = manifest.ends_with("Cargo.toml") && folder.components().count() == 1;
    of_a_crate.then(|| folder.to_string_lossy().into_owned())
}

/// The edges in the page's `edges` block, one line per crate: `a -> b, c`, or `a -> nothing`.
fn drawn_edges(page: &str) -> Result<Edges, String> {
    let mut lines = page.lines().skip_while(|line| line.trim() != "```edges").skip(1).peekable();
    if lines.peek().is_none() {
        return Err("there is no block that begins with ```edges".to_owned());
    }
    let mut edges = Edges::new();
    for line in lines.take_while(|line| line.trim() != "```") {
        let (from, to) = line
            .split_once("->")
            .ok_or_else(|| format!("`{line}` is not `crate -> crate, crate`"))?;
        let to = match to.trim() {
            "nothing" => BTreeSet::new(),
            list => list.split(',').map(|name| name.trim().to_owned()).collect(),
        };
        let from = from.trim().to_owned();
        if edges.insert(from.clone(), to).is_some() {
            return Err(format!("{from} has two lines"));
        }
    }
    Ok(edges)
}

/// The edges between crates of the workspace that end up in the product: those for tests do not.
fn real_edges(metadata: &Value) -> Edges {
    let members: BTreeSet<&str> =
        packages(metadata).iter().map(|package| text(&package["name"])).collect();
    product_packages(metadata)
        .map(|package| {
            let used = product_dependencies(package).map(|dependency| text(&dependency["name"]));
            let of_ours = used.filter(|name| members.contains(name)).map(str::to_owned);
            (text(&package["name"]).to_owned(), of_ours.collect())
        })
        .collect()
}

fn test_only_features(metadata: &Value) -> Vec<String> {
    let mut faults = Vec::new();
    for package in product_packages(metadata) {
        let name = text(&package["name"]);
        for dependency in product_dependencies(package) {
            let asked = list(&dependency["features"]).iter().map(text);
            for feature in asked.filter(|feature| TEST_ONLY_FEATURES.contains(feature)) {
                faults
                    .push(format!("{name} asks {} for its `{feature}`", text(&dependency["name"])));
            }
        }
        let by_default = list(&package["features"]["default"]).iter().map(text);
        for feature in by_default.filter(|feature| TEST_ONLY_FEATURES.contains(feature)) {
            faults.push(format!("{name} has `{feature}` on by default"));
        }
    }
    faults
}

fn product_packages(metadata: &Value) -> impl Iterator<Item = &Value> {
    packages(metadata).iter().filter(|package| !TOOLS.contains(&text(&package["name"])))
}

fn product_dependencies(package: &Value) -> impl Iterator<Item = &Value> {
    list(&package["dependencies"]).iter().filter(|dependency| dependency["kind"] != "dev")
}

fn packages(metadata: &Value) -> &[Value] {
    list(&metadata["packages"])
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

fn differences(drawn: &Edges, real: &Edges) -> Vec<String> {
    let pairs = |edges: &Edges| -> BTreeSet<(String, String)> {
        let each = edges.iter();
        each.flat_map(|(from, to)| to.iter().map(move |to| (from.clone(), to.clone()))).collect()
    };
    let (drawn, real) = (pairs(drawn), pairs(real));
    let not_drawn =
        real.difference(&drawn).map(|(from, to)| format!("{from} -> {to} is used but not drawn"));
    let not_used =
        drawn.difference(&real).map(|(from, to)| format!("{from} -> {to} is drawn but not used"));
    not_drawn.chain(not_used).collect()
}

fn wrong_folders(drawn: &Edges, folders: &BTreeSet<String>) -> Vec<String> {
    let names: BTreeSet<String> = drawn.keys().cloned().collect();
    let not_drawn = folders.difference(&names).map(|name| format!("crates/{name} has no line"));
    let no_folder =
        names.difference(folders).map(|name| format!("{name} has a line but no folder in crates/"));
    not_drawn.chain(no_folder).collect()
}

/// Edges as the tests below write them.
fn edges(lines: &[(&str, &[&str])]) -> Edges {
    let owned = |names: &[&str]| names.iter().copied().map(str::to_owned).collect();
    lines.iter().map(|(from, to)| ((*from).to_owned(), owned(to))).collect()
}

#[test]
fn the_edges_block_reads_as_edges() {
    let page = "# Title\n\n```text\nx -> y\n```\n\n```edges\ncore -> nothing\nkv -> core, db\n```\n\nx -> y\n";
    assert_eq!(drawn_edges(page), Ok(edges(&[("core", &[]), ("kv", &["core", "db"])])));
}

#[test]
fn a_block_that_can_not_be_read_is_a_fault() {
    for bad in ["# Title\n", "```edges\ncore\n```\n", "```edges\na -> b\na -> c\n```\n"] {
        assert!(drawn_edges(bad).is_err(), "{bad}");
    }
}

#[test]
fn an_edge_that_is_not_drawn_and_one_that_is_not_used_are_faults() {
    let drawn = edges(&[("kv", &["core", "db"]), ("core", &[])]);
    let real = edges(&[("kv", &["core"]), ("core", &["db"])]);
    assert!(differences(&drawn, &drawn).is_empty());
    assert_eq!(
        differences(&drawn, &real),
        ["core -> db is used but not drawn", "kv -> db is drawn but not used"]
    );
}

#[test]
fn a_crate_without_a_line_and_a_line_without_a_crate_are_faults() {
    let folders = ["core", "kv"].map(str::to_owned).into();
    assert_eq!(
        wrong_folders(&edges(&[("core", &[]), ("db", &[])]), &folders),
        ["crates/kv has no line", "db has a line but no folder in crates/"]
    );
}

#[test]
fn only_what_ends_up_in_the_product_is_an_edge() {
    let metadata = serde_json::json!({"packages": [
        {"name": "kv", "dependencies": [
            {"name": "core", "kind": null},
            {"name": "proto", "kind": "build"},
            {"name": "torture", "kind": "dev"},
            {"name": "serde", "kind": null},
        ]},
        {"name": "core", "dependencies": []},
        {"name": "proto", "dependencies": []},
        {"name": "torture", "dependencies": [{"name": "kv", "kind": null}]},
    ]});
    let expected = edges(&[("core", &[]), ("kv", &["core", "proto"]), ("proto", &[])]);
    assert_eq!(real_edges(&metadata), expected);
}

#[test]
fn asking_for_a_test_only_feature_is_a_fault_outside_of_the_tools() {
    let asks = serde_json::json!([{"name": "db", "kind": null, "features": ["torture"]}]);
    let metadata = serde_json::json!({"packages": [
        {"name": "kv", "dependencies": asks},
        {"name": "db", "dependencies": [], "features": {"default": ["torture"], "torture": []}},
        {"name": "torture", "dependencies": asks},
    ]});
    assert_eq!(
        test_only_features(&metadata),
        ["kv asks db for its `torture`", "db has `torture` on by default"]
    );
}

#[test]
fn a_crate_folder_is_one_below_crates() {
    for (manifest, folder) in [
        ("crates/vedetta-kv/Cargo.toml", Some("vedetta-kv")),
        ("crates/vedetta-kv/rustfmt.toml", None),
        ("crates/vedetta-kv/tests/data/Cargo.toml", None),
        ("bench/Cargo.toml", None),
        ("Cargo.toml", None),
    ] {
        assert_eq!(crate_folder(Path::new(manifest)).as_deref(), folder, "{manifest}");
    }
}
