use std::io::Write;

use clap::{Args, CommandFactory as _};
use clap_complete::Shell;

/// Print a script that completes commands and options in a shell
///
/// For bash: `vedetta completions bash > ~/.local/share/bash-completion/completions/vedetta`
#[derive(Debug, Args)]
pub(crate) struct Completions {
    /// The shell
    #[arg(value_enum)]
    shell: Shell,
}

impl Completions {
    pub(crate) fn run(self, out: &mut impl Write) -> anyhow::Result<()> {
        let mut script = Vec::new();
        clap_complete::generate(self.shell, &mut crate::Cli::command(), "vedetta", &mut script);
        Ok(out.write_all(&script)?)
    }
}
