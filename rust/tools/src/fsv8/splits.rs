//! The splits of a leaf: sets of new leaves that together stand for the same weights as the leaf.
//!
//! * A leaf with promise 1, which announces a non-zero, becomes two leaves without promise, one per symbol.
//! * A leaf (w, d) becomes (w, a), (w 0^a, b), (w 0^(a+b), c) ... with a + b + c + ... = d: the first non-zero of the
//!   next d weights is among the first a, or among the next b, and so on.
//! * A leaf (w, nothing) becomes such a sequence of promises and one more leaf (w 0^d, nothing).

use super::source::Source;

/// The leaves that replace one leaf.
#[derive(Debug, Clone)]
pub(super) struct Split {
    pub leaves: Vec<NewLeaf>,
}

/// A leaf of a split, relative to the leaf that it replaces.
#[derive(Debug, Clone, Copy)]
pub(super) struct NewLeaf {
    /// The number of zeros appended to the word.
    pub zeros: u8,
    /// The symbol appended after the zeros, or 0 for none.
    pub symbol: u8,
    /// The class of the new leaf's promise.
    pub class: usize,
    /// The probability of the new leaf given the old one.
    pub probability: f64,
}

/// The maximum number of promises of a split, except that a short promise may be split into ones. Longer sequences
/// result from several splits; there are too many to try directly.
const MAX_PROMISES: usize = 6;

/// The longest promise that may be split into ones.
const SHORT_PROMISE: u8 = 12;

/// The maximum number of zeros that a split of a leaf without promise covers, unless a single promise is longer.
const MAX_ZEROS: u8 = 40;

/// The maximum number of promises of a split of a leaf without promise if their sum is not itself a promise.
const MAX_UNUSUAL_PROMISES: usize = 3;

impl Split {
    /// The increase in the number of leaves.
    pub fn added(&self) -> usize {
        self.leaves.len() - 1
    }

    /// The maximum number of weights appended to the word.
    pub fn longest(&self) -> u8 {
        let lengths = self.leaves.iter().map(NewLeaf::length);
        lengths.max().unwrap_or(0)
    }
}

impl NewLeaf {
    /// The number of weights appended to the word.
    pub fn length(&self) -> u8 {
        self.zeros + u8::from(self.symbol > 0)
    }
}

/// All splits to try for the leaves of each class.
pub(super) fn all(promises: &[u8], source: &Source) -> Vec<Vec<Split>> {
    let of_class = |&promise: &u8| match promise {
        0 => without_promise(promises, source),
        1 => vec![by_symbol(source)],
        _ => {
            let mut splits = Vec::new();
            let most = match promise {
                ..=SHORT_PROMISE => promise.into(),
                _ => MAX_PROMISES,
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

fn without_promise(promises: &[u8], source: &Source) -> Vec<Split> {
    let mut splits = Vec::new();
    let long_promises = promises.iter().copied().filter(|&promise| promise > MAX_ZEROS);
    for total in (1..=MAX_ZEROS).chain(long_promises) {
        let most = if promises.contains(&total) {
            MAX_PROMISES - 1
        } else {
            MAX_UNUSUAL_PROMISES
        };
        for_sums(promises, total, most, &mut |sum| {
            splits.push(by_promises(promises, sum, true, source))
        });
    }
    splits
}

fn by_symbol(source: &Source) -> Split {
    let [p0, p1, p2] = source.probabilities;
    let leaf = |symbol, p: f64| NewLeaf {
        zeros: 0,
        symbol,
        class: 0,
        probability: p / (1.0 - p0),
    };
    Split {
        leaves: vec![leaf(1, p1), leaf(2, p2)],
    }
}

/// The split by a sequence of promises (as classes), with one more leaf without promise if the old leaf is `open`,
/// that is, has no promise.
fn by_promises(promises: &[u8], classes: &[usize], open: bool, source: &Source) -> Split {
    let total: u8 = classes.iter().map(|&class| promises[class]).sum();
    let certain = if open { 1.0 } else { 1.0 - source.zeros(total) };
    let mut zeros = 0;
    let mut leaves: Vec<NewLeaf> = classes
        .iter()
        .map(|&class| {
            let before = zeros;
            zeros += promises[class];
            let probability = (source.zeros(before) - source.zeros(zeros)) / certain;
            NewLeaf {
                zeros: before,
                symbol: 0,
                class,
                probability,
            }
        })
        .collect();
    if open {
        leaves.push(NewLeaf {
            zeros,
            symbol: 0,
            class: 0,
            probability: source.zeros(zeros),
        });
    }
    Split { leaves }
}

/// Calls `found` with every sequence of at most `most` promises (by class) whose sum is `total`.
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
    fn the_probabilities_of_a_split_sum_to_one() {
        let source = Source {
            probabilities: [0.885, 0.0575, 0.0575],
        };
        for splits in all(&[0, 4, 2, 1], &source) {
            assert!(!splits.is_empty());
            for split in splits {
                let sum: f64 = split.leaves.iter().map(|leaf| leaf.probability).sum();
                assert!((sum - 1.0).abs() < 1e-12 && split.added() >= 1);
            }
        }
    }
}
