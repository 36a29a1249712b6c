//! The resolutions that are made, and what each costs.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// One resolution.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Rung {
    /// Lines of a picture.
    pub height: u32,
    /// How many slots making it takes, and how much of a job it is.
    pub cost: u32,
}

const fn rung(height: u32, cost: u32) -> Rung {
    Rung { height, cost }
}

/// All of them, the largest first.
pub const LADDER: [Rung; 7] = [
    rung(2160, 64),
    rung(1080, 32),
    rung(720, 16),
    rung(480, 8),
    rung(360, 4),
    rung(240, 2),
    rung(144, 1),
];

/// Those that a video of this height is made into: none of them makes it larger. The largest is first, as
/// what takes longest and is begun last would run alone in the end.
pub fn ladder(height: u32) -> impl Iterator<Item = Rung> {
    LADDER.into_iter().filter(move |rung| rung.height <= height)
}

/// `480p`.
impl fmt::Display for Rung {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}p", self.height)
    }
}

impl FromStr for Rung {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        LADDER.into_iter().find(|rung| rung.to_string() == text).ok_or_else(|| {
            let all = LADDER.map(|rung| rung.to_string()).join(", ");
            format!("{text:?} is no resolution: give one of {all}")
        })
    }
}

impl TryFrom<String> for Rung {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<Rung> for String {
    fn from(rung: Rung) -> Self {
        rung.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_video_is_never_made_larger() {
        let heights = |height| ladder(height).map(|rung| rung.height).collect::<Vec<_>>();
        assert_eq!(heights(143), [0_u32; 0]);
        assert_eq!(heights(144), [144]);
        assert_eq!(heights(480), [480, 360, 240, 144]);
        assert_eq!(heights(1079), [720, 480, 360, 240, 144]);
        assert_eq!(heights(4320), [2160, 1080, 720, 480, 360, 240, 144]);
    }

    #[test]
    fn a_rung_is_written_and_read_by_its_name() {
        for rung in LADDER {
            assert_eq!(rung.to_string().parse(), Ok(rung));
        }
        let error = "1440p".parse::<Rung>().unwrap_err();
        assert!(error.contains("2160p, 1080p, 720p"), "{error}");
    }
}
