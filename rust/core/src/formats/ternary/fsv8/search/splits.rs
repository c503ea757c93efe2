//! The ways to replace a leaf of a tree by several, which together say the same.
//!
//! * A leaf that promises a non-zero next becomes two, one for each symbol, which promise nothing.
//! * A leaf (w, d) becomes (w, a), (w 0^a, b), (w 0^(a+b), c) ... with a + b + c + ... = d: the first non-zero of the
//!   next d weights is among the first a, or else among the next b, and so on.
//! * A leaf (w, nothing) becomes such a row of promises and one more leaf (w 0^d, nothing).

use super::Source;

/// The new leaves of a split.
#[derive(Debug, Clone)]
pub(super) struct Split {
    pub parts: Vec<Part>,
}

/// A new leaf.
#[derive(Debug, Clone, Copy)]
pub(super) struct Part {
    /// Zeros that are added to the word.
    pub zeros: u8,
    /// The symbol that is added then, or 0 for none.
    pub symbol: u8,
    /// The class of its promise.
    pub class: usize,
    /// Its probability if the old leaf is reached.
    pub probability: f64,
}

/// A split makes at most this many leaves with promises, except that a short promise may fall apart into ones: longer
/// rows can be made in steps, and there are too many of them to try.
const MAX_PARTS: usize = 6;

/// The longest of the short promises.
const SHORT_PROMISE: u8 = 12;

/// Splits of leaves without promise cover at most so many zeros ...
const MAX_ZEROS: u8 = 40;

/// ... by at most so many promises, where their sum is not itself a promise.
const MAX_UNUSUAL_PARTS: usize = 3;

impl Split {
    /// The leaves that it adds.
    pub fn added(&self) -> usize {
        self.parts.len() - 1
    }

    /// The most weights that it adds to a word.
    pub fn longest(&self) -> u8 {
        self.parts
            .iter()
            .map(|part| part.zeros + u8::from(part.symbol > 0))
            .max()
            .unwrap_or(0)
    }
}

/// The splits of the leaves of each class.
pub(super) fn all(promises: &[u8], source: &Source) -> Vec<Vec<Split>> {
    let of_class = |&promise: &u8| match promise {
        0 => of_nothing(promises, source),
        1 => vec![by_symbol(source)],
        _ => {
            let mut splits = Vec::new();
            let most = if promise <= SHORT_PROMISE {
                promise.into()
            } else {
                MAX_PARTS
            };
            for_sums(promises, promise, most, &mut |sum| {
                if sum.len() >= 2 {
                    splits.push(by_promises(promises, sum, false, source));
                }
            });
            splits
        }
    };
    promises.iter().map(of_class).collect()
}

fn of_nothing(promises: &[u8], source: &Source) -> Vec<Split> {
    let mut splits = Vec::new();
    let long_promises = promises.iter().copied().filter(|&promise| promise > MAX_ZEROS);
    for total in (1..=MAX_ZEROS).chain(long_promises) {
        let most = if promises.contains(&total) {
            MAX_PARTS - 1
        } else {
            MAX_UNUSUAL_PARTS
        };
        for_sums(promises, total, most, &mut |sum| {
            splits.push(by_promises(promises, sum, true, source))
        });
    }
    splits
}

fn by_symbol(source: &Source) -> Split {
    let [p0, p1, p2] = source.probabilities;
    let part = |symbol, p: f64| Part {
        zeros: 0,
        symbol,
        class: 0,
        probability: p / (1.0 - p0),
    };
    Split {
        parts: vec![part(1, p1), part(2, p2)],
    }
}

/// The leaves of a row of promises (by class), with one more that promises nothing if the old leaf is `open`.
fn by_promises(promises: &[u8], classes: &[usize], open: bool, source: &Source) -> Split {
    let total: u8 = classes.iter().map(|&class| promises[class]).sum();
    let certain = if open { 1.0 } else { 1.0 - source.zeros(total) };
    let mut zeros = 0;
    let mut parts: Vec<Part> = classes
        .iter()
        .map(|&class| {
            let before = zeros;
            zeros += promises[class];
            let probability = (source.zeros(before) - source.zeros(zeros)) / certain;
            Part {
                zeros: before,
                symbol: 0,
                class,
                probability,
            }
        })
        .collect();
    if open {
        parts.push(Part {
            zeros,
            symbol: 0,
            class: 0,
            probability: source.zeros(zeros),
        });
    }
    Split { parts }
}

/// Calls `found` with every ordered sum of at most `most` promises (by class) that makes `total`.
fn for_sums(promises: &[u8], total: u8, most: usize, found: &mut impl FnMut(&[usize])) {
    fn extend(
        promises: &[u8],
        left: u8,
        most: usize,
        sum: &mut Vec<usize>,
        found: &mut impl FnMut(&[usize]),
    ) {
        if left == 0 {
            return found(sum);
        }
        if sum.len() == most {
            return;
        }
        for (class, &promise) in promises.iter().enumerate().skip(1) {
            if promise <= left {
                sum.push(class);
                extend(promises, left - promise, most, sum, found);
                sum.pop();
            }
        }
    }
    extend(promises, total, most, &mut Vec::new(), found);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_share_the_whole_probability() {
        let source = Source {
            probabilities: [0.885, 0.0575, 0.0575],
        };
        for splits in all(&[0, 4, 2, 1], &source) {
            assert!(!splits.is_empty());
            for split in splits {
                let sum: f64 = split.parts.iter().map(|part| part.probability).sum();
                assert!((sum - 1.0).abs() < 1e-12 && split.added() >= 1);
            }
        }
    }
}
