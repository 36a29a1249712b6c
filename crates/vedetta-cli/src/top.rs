use std::io::Write;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use clap::Args;
use console::{Key, Term};
use vedetta::fleet::roster::Status;
use vedetta::fleet::wire::Workers;
use vedetta::jobs::wire::{QueueInfo, Queues};

use crate::client::{Client, ClientError, Remote};
use crate::output::{self, Format};
use crate::worker::time;
use crate::{queue, worker};

/// Watch queues, workers and rates, live; `q` ends it
///
/// Where the output is no terminal, or with `--output json`, it shows them once.
#[derive(Debug, Args)]
#[command(after_help = crate::exit::HELP)]
pub(crate) struct Top {
    #[command(flatten)]
    remote: Remote,
    /// How often to look
    #[arg(long, value_name = "TIME", value_parser = time, default_value = "1s")]
    every: Duration,
}

/// How seldom and how often one may look.
const EVERY: std::ops::RangeInclusive<Duration> =
    Duration::from_millis(100)..=Duration::from_secs(60);
/// A server that is away is waited for so long.
const AWAY: Duration = Duration::from_secs(60);

/// What is seen at one look.
#[derive(serde::Serialize)]
struct Look {
    queues: Vec<QueueInfo>,
    #[serde(flatten)]
    workers: Workers,
}

impl Look {
    fn at(client: &Client) -> Result<Self, ClientError> {
        let Queues { queues } = client.get("/api/v1/queues")?;
        Ok(Self { queues, workers: client.get("/api/v1/workers")? })
    }
}

impl Top {
    pub(crate) fn run(self, out: &mut impl Write) -> anyhow::Result<()> {
        let client = Client::new(&self.remote)?;
        let first = Look::at(&client)?;
        if self.remote.output == Format::Json {
            return Ok(output::json(out, &first)?);
        }
        let term = Term::stdout();
        if !term.is_term() {
            return Ok(out.write_all(&drawn(&first, self.remote.server())?)?);
        }
        let every = self.every.clamp(*EVERY.start(), *EVERY.end());
        let keys = keys(term.clone());
        term.hide_cursor()?;
        let done = self.watch(&client, &term, first, every, &keys);
        term.show_cursor()?;
        done
    }

    fn watch(
        &self,
        client: &Client,
        term: &Term,
        first: Look,
        every: Duration,
        keys: &mpsc::Receiver<Key>,
    ) -> anyhow::Result<()> {
        let (mut look, mut heard) = (first, Instant::now());
        term.clear_screen()?;
        loop {
            draw(term, &look, self.remote.server())?;
            let until = Instant::now() + every;
            loop {
                match keys.recv_timeout(until.saturating_duration_since(Instant::now())) {
                    Ok(Key::Char('q' | 'Q') | Key::Escape | Key::CtrlC) => return Ok(()),
                    Ok(_) => {}
                    Err(RecvTimeoutError::Timeout) => break,
                    // Nobody can press anything: look on until it is ended.
                    Err(RecvTimeoutError::Disconnected) => {
                        std::thread::sleep(until.saturating_duration_since(Instant::now()));
                        break;
                    }
                }
            }
            match Look::at(client) {
                Ok(now) => (look, heard) = (now, Instant::now()),
                Err(ClientError::Unreachable { .. }) if heard.elapsed() < AWAY => {}
                Err(error) => return Err(error).context("nothing more to see"),
            }
        }
    }
}

/// What is pressed, from a thread that ends with the program.
fn keys(term: Term) -> mpsc::Receiver<Key> {
    let (tell, keys) = mpsc::sync_channel(8);
    std::thread::spawn(move || {
        while let Ok(key) = term.read_key_raw() {
            if tell.send(key).is_err() {
                break;
            }
        }
    });
    keys
}

/// Over what was there, and no more than there is room for.
fn draw(term: &Term, look: &Look, server: &str) -> anyhow::Result<()> {
    let (height, width) = term.size();
    let text = drawn(look, server)?;
    let text = String::from_utf8_lossy(&text);
    let room = usize::from(height).saturating_sub(1);
    term.move_cursor_to(0, 0)?;
    for line in text.lines().take(room) {
        let line: String = line.chars().take(usize::from(width)).collect();
        term.clear_line()?;
        term.write_line(&line)?;
    }
    term.clear_to_end_of_screen()?;
    Ok(())
}

fn drawn(look: &Look, server: &str) -> std::io::Result<Vec<u8>> {
    let mut out = Vec::new();
    let gone = [Status::Stopped, Status::Silent];
    let there = look.workers.workers.iter().filter(|worker| !gone.contains(&worker.status));
    let sum = |of: fn(&QueueInfo) -> u64| look.queues.iter().map(of).sum::<u64>();
    writeln!(
        out,
        "{}   {} ready, {} running, {} workers; in the last minute {} done, {} failed\n",
        output::one_line(server),
        sum(|queue| queue.ready),
        sum(|queue| queue.running),
        there.count(),
        sum(|queue| queue.done_per_minute),
        sum(|queue| queue.failed_per_minute),
    )?;
    queue::table(&mut out, &look.queues)?;
    writeln!(out)?;
    worker::list(&mut out, &look.workers, false)?;
    Ok(out)
}
