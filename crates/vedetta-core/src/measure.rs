//! Numbers about a program, in no format yet.

/// Numbers that are of one kind, and differ in their labels.
#[derive(Debug, Clone, PartialEq)]
pub struct Family {
    /// What it is called.
    pub name: &'static str,
    /// How it is to be read.
    pub kind: FamilyKind,
    /// One sentence about it.
    pub help: &'static str,
    /// The numbers.
    pub samples: Vec<Sample>,
}

/// How numbers are to be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FamilyKind {
    /// It stands where it stands.
    Gauge,
    /// It only grows, from the start of the program on.
    Counter,
    /// How many there were of which size, from the start of the program on.
    Histogram,
}

/// A number.
#[derive(Debug, Clone, PartialEq)]
pub struct Sample {
    /// Of what.
    pub labels: Vec<(&'static str, String)>,
    /// How much.
    pub value: Value,
}

/// How much.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// A whole number.
    Whole(u64),
    /// Any number.
    Real(f64),
    /// How many were up to each bound, those of the bounds below it included; and what they are together.
    Sizes {
        /// The bounds, growing.
        bounds: Vec<f64>,
        /// One more than there are bounds: the last is of all.
        counts: Vec<u64>,
        /// What all are together.
        sum: f64,
    },
}

impl From<u64> for Value {
    fn from(number: u64) -> Self {
        Self::Whole(number)
    }
}

impl From<usize> for Value {
    fn from(number: usize) -> Self {
        Self::Whole(number as u64)
    }
}

impl From<f64> for Value {
    fn from(number: f64) -> Self {
        Self::Real(number)
    }
}

impl Family {
    /// One that has no numbers yet.
    pub fn new(name: &'static str, kind: FamilyKind, help: &'static str) -> Self {
        Self { name, kind, help, samples: Vec::new() }
    }

    /// Adds a number.
    pub fn add(&mut self, labels: &[(&'static str, &str)], value: impl Into<Value>) {
        let labels = labels.iter().map(|(label, text)| (*label, (*text).to_owned())).collect();
        self.samples.push(Sample { labels, value: value.into() });
    }
}
