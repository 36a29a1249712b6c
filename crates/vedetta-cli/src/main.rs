//! The `vedetta` program.
fn main() {}
