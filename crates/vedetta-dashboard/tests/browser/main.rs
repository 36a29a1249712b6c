//! The pages in a real browser: they are live, obey nothing that people write, and can be used by everybody.
//!
//! With `VEDETTA_PICTURES=FOLDER` the test that visits every page leaves a picture of each there.

mod stories;
#[expect(dead_code, reason = "the tests without a browser use the rest of it")]
#[path = "../http/support.rs"]
mod support;
mod visits;
