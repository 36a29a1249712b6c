//! What people see: tables, JSON, and nothing that could drive their terminal.

use std::fmt::Write as _;
use std::io::{self, IsTerminal as _, Write};

use clap::ValueEnum;
use serde::Serialize;

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// For people
    Table,
    /// For programs
    Json,
}

/// Whether control characters would reach a terminal.
pub(crate) fn on_terminal() -> bool {
    io::stdout().is_terminal()
}

/// Characters that move the cursor, change colours or turn the direction of text.
fn is_harmful(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// Bytes as text on one line; what is harmful or no text becomes an escape.
pub(crate) fn escape(bytes: &[u8]) -> String {
    let mut out = String::with_capacity(bytes.len());
    for chunk in bytes.utf8_chunks() {
        for c in chunk.valid().chars() {
            match c {
                '\n' => out.push_str("\\n"),
                '\t' => out.push_str("\\t"),
                '\r' => out.push_str("\\r"),
                '\\' => out.push_str("\\\\"),
                c if is_harmful(c) => out.extend(c.escape_unicode()),
                c => out.push(c),
            }
        }
        for byte in chunk.invalid() {
            let _ = write!(out, "\\x{byte:02x}");
        }
    }
    out
}

/// A sentence with whatever it quotes kept from breaking the line or the terminal.
pub(crate) fn one_line(text: &str) -> String {
    let mut out = String::new();
    for c in text.chars() {
        match c {
            '\n' => out.push(' '),
            c if is_harmful(c) => out.extend(c.escape_unicode()),
            c => out.push(c),
        }
    }
    out
}

/// One line of JSON.
pub(crate) fn json(out: &mut impl Write, value: &impl Serialize) -> io::Result<()> {
    let text = serde_json::to_string(value)?;
    // Such characters stand in strings only, where JSON has its own escape for them; but for the white space
    // of what came as it was written, which stands between them only.
    let safe = text.chars().fold(String::with_capacity(text.len()), |mut safe, c| {
        match c {
            '\n' | '\r' | '\t' => safe.push(' '),
            c if is_harmful(c) => {
                let _ = write!(safe, "\\u{:04x}", u32::from(c));
            }
            c => safe.push(c),
        }
        safe
    });
    writeln!(out, "{safe}")
}

/// Columns under their names.
pub(crate) fn table<const N: usize>(
    out: &mut impl Write,
    names: [&str; N],
    rows: &[[String; N]],
) -> io::Result<()> {
    let mut widths = names.map(|name| name.chars().count());
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let names = names.map(str::to_owned);
    for row in std::iter::once(&names).chain(rows) {
        let mut line = String::new();
        for (cell, width) in row.iter().zip(widths) {
            let _ = write!(line, "{cell:width$}  ");
        }
        writeln!(out, "{}", line.trim_end())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_that_drives_a_terminal_gets_through() {
        for (bytes, shown) in [
            (&b"plain"[..], "plain"),
            (b"\x1b[31mred", "\\u{1b}[31mred"),
            (b"two\nlines\t\r", "two\\nlines\\t\\r"),
            (b"a\\b", "a\\\\b"),
            (b"\xff\x00", "\\xff\\u{0}"),
            ("\u{202e}evil \u{9b}".as_bytes(), "\\u{202e}evil \\u{9b}"),
            ("grün ✓".as_bytes(), "grün ✓"),
        ] {
            assert_eq!(escape(bytes), shown);
        }
        let mut out = Vec::new();
        json(&mut out, &"\u{1b}\u{9b}\u{202e}\n").unwrap();
        assert_eq!(out, b"\"\\u001b\\u009b\\u202e\\n\"\n");
        assert_eq!(one_line("a\n\u{1b}b"), "a \\u{1b}b");
        let mut out = Vec::new();
        let written = serde_json::value::RawValue::from_string("[1,\r\n\t2]".to_owned()).unwrap();
        json(&mut out, &written).unwrap();
        assert_eq!(out, b"[1,   2]\n");
    }

    #[test]
    fn columns_stand_under_their_names() {
        let mut out = Vec::new();
        let rows = [["a".into(), "1".into()], ["long".into(), "22".into()]];
        table(&mut out, ["KEY", "N"], &rows).unwrap();
        assert_eq!(String::from_utf8(out).unwrap(), "KEY   N\na     1\nlong  22\n");
    }
}
