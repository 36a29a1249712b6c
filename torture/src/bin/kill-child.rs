//! The process that the kill loop kills: a store under load, telling its parent all it does.
//!
//! `kill-child FOLDER SEED FIRST_ID RESUME...`: notes go to stdout, one per line.

use std::io::Write as _;
use std::path::PathBuf;
use std::sync::Arc;

use torture::bed::How;
use torture::note::Note;
use torture::workload::{Failing, Notes, Workload};
use vedetta_db::{DataFolder, Torture};

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let mut arguments = std::env::args().skip(1);
    let folder = PathBuf::from(arguments.next().expect("a folder"));
    let mut numbers = arguments.map(|text| text.parse::<u64>().expect("a number"));
    let seed = numbers.next().expect("a seed");
    let first_id = numbers.next().expect("an id");
    let resume: Vec<u64> = numbers.collect();

    let notes: Notes = Arc::new(|note: Note| {
        // One write per line, made before the next step. Without a parent there is nobody to tell.
        let line = format!("{note}\n");
        if std::io::stdout().lock().write_all(line.as_bytes()).is_err() {
            std::process::exit(0);
        }
    });
    let _folder = match DataFolder::open(&folder) {
        Ok(folder) => folder,
        Err(error) => return notes(Note::Trouble(torture::bed::explain(&error))),
    };
    let torture = Torture { checkpoint_step: Some(24), ..Torture::default() };
    let how = How { ballast: 1 << 16, torture, ..How::default() };
    let store = match how.open(&folder).await {
        Ok(store) => store,
        Err(error) => return notes(Note::Trouble(error.to_string())),
    };
    let workload = Workload {
        seed,
        first_id,
        writers: 6,
        writes: 400,
        short_leases: true,
        failing: Failing::Wrong,
    };
    workload.run(&store, &resume, &notes).await;
    store.close().await;
}
