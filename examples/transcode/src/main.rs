//! See the library.
//!
//! ```text
//! cargo run --release -p transcode -- sample media         some videos to try it with
//! cargo run --release -p transcode -- add media/*.mp4      into the queue in ./transcode-data
//! cargo run --release -p transcode -- work                 until Ctrl-C
//!
//! … -- --queue http://127.0.0.1:7070 work                  on the queue of a running `vedetta up`
//! … -- --queue nats://127.0.0.1:4222 work                  on a JetStream: nats pub media.files '{"file": "/films/a.mov"}'
//! ```

use std::num::NonZeroU32;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context as _;
use clap::Parser;
use tokio::signal::unix::{SignalKind, signal};
use transcode::{Asked, LADDER, Place, Queue, Rung, Tools, sample};

/// How long what runs may take when it is to end. What is then ended is tried again by others.
const GRACE: Duration = Duration::from_secs(10);

/// Makes media files into every resolution up to their own.
#[derive(Debug, Parser)]
struct Args {
    #[command(flatten)]
    place: Place,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// Work until Ctrl-C or SIGTERM
    Work {
        /// How many slots there are [default: the cores, but two if there are more than four]
        #[arg(long)]
        capacity: Option<NonZeroU32>,
    },
    /// Ask for files to be made into all resolutions
    Add {
        /// Which
        #[arg(required = true)]
        files: Vec<PathBuf>,
        /// The folder to put them in [default: that of each file]
        #[arg(long)]
        outputs: Option<PathBuf>,
        /// Only this resolution, for example 480p; can be given several times
        #[arg(long = "resolution")]
        resolutions: Vec<Rung>,
    },
    /// Have FFmpeg make a test video of each size
    Sample {
        /// Where
        folder: PathBuf,
        /// How long each is
        #[arg(long, default_value_t = 4)]
        seconds: u32,
    },
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    let Args { mut place, command } = Args::parse();
    let tools = Tools::default();
    match command {
        Command::Sample { folder, seconds } => {
            std::fs::create_dir_all(&folder)
                .with_context(|| format!("cannot make {}", folder.display()))?;
            for rung in LADDER {
                let path = folder.join(format!("sample-{rung}.mp4"));
                sample(&tools, &path, rung.height, 30, seconds).await?;
                println!("{}", path.display());
            }
        }
        Command::Add { files, outputs, resolutions } => {
            let queue = Queue::open(&place).await?;
            // As every worker finds it, wherever it was started.
            let outputs = outputs.map(std::path::absolute).transpose()?;
            for file in files {
                let file = std::path::absolute(&file)?;
                let asked =
                    Asked { file, outputs: outputs.clone(), resolutions: resolutions.clone() };
                let added = queue.add(&asked).await?;
                let news = if added.is_new { "added" } else { "waits already" };
                println!("{} {}: {news}", added.id, asked.file.display());
            }
            queue.close().await?;
        }
        Command::Work { capacity } => {
            place.max_ack_pending = place.max_ack_pending.or(capacity);
            let queue = Queue::open(&place).await?;
            let working = queue.worker(tools, capacity).start(queue.jobs())?;
            println!("ready, {} slots", working.slots().1);
            let mut terminate = signal(SignalKind::terminate())?;
            tokio::select! {
                _ = tokio::signal::ctrl_c() => {}
                _ = terminate.recv() => {}
            }
            working.stop(GRACE).await;
            queue.close().await?;
        }
    }
    Ok(())
}
