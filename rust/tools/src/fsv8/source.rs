//! What a dictionary is designed for.

/// The memoryless source of symbols 0, 1 and 2 that a dictionary is designed for.
#[derive(Debug, Clone, Copy)]
pub(super) struct Source {
    pub probabilities: [f64; 3],
}

impl Source {
    /// The probability of `count` consecutive zeros.
    pub fn zeros(&self, count: u8) -> f64 {
        self.probabilities[0].powi(i32::from(count))
    }

    /// The entropy in bits per weight.
    pub fn entropy(&self) -> f64 {
        self.probabilities.iter().map(|p| -p * p.log2()).sum()
    }
}

/// The promise of each state of a dictionary, and the number of codes of its class.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct StateSet {
    pub promises: Vec<u8>,
    pub class_sizes: Vec<u16>,
}
