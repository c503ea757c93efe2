//! Searches a dictionary for given probabilities.
//!
//! A dictionary is a set of complete trees, one per state. A leaf is a word with its promise. A tree grows by
//! replacing a leaf with several (`splits`) until it has one leaf per code. The search is a policy iteration: it
//! improves the tree of each state for fixed relative values of the states (in weights, relative to state 0), then
//! solves for the relative values of the improved trees (`chain`).
//!
//! Every class has a fixed number of codes, which a greedy tree uses up too early or too late. Penalties on the
//! leaves of each class, found by a random search, correct the greedy choice.

use moepack_core::formats::ternary::fsv8::dictionary::{CODES, Dictionary};
use moepack_core::{Error, Result};

use super::chain;
use super::source::{Source, StateSet};
use super::splits::{self, Split};
use super::tree::{Grower, Tree};

/// The maximum length of a word. Good dictionaries have hardly any longer words, and kernels read ahead by the
/// longest.
const MAX_LENGTH: u8 = 120;

/// The iterations, each of which improves all trees and then their relative values.
const ROUNDS: usize = 6;

/// The goal of a search: the source, the limits of words, and the effort.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Goal {
    /// The share of zeros in thousandths, 1 to 999.
    pub p0_thousandths: u16,
    /// The share of symbol 1 among the non-zeros in thousandths, 500 to 999.
    pub share_thousandths: u16,
    /// The maximum number of non-zeros of a word: 2 or 3. Three are better below p0 = 0.81.
    pub max_nonzeros: u8,
    /// Random steps per tree and round. The embedded dictionaries were found with 60.
    pub effort: usize,
    /// The seed of the random numbers.
    pub seed: u64,
}

/// Searches a dictionary: tries all state sets briefly, then the best one thoroughly. The same goal gives the same
/// words.
///
/// # Errors
/// [`Error::InvalidArgument`] if the goal is out of range.
pub fn search(goal: &Goal) -> Result<Dictionary> {
    let (p0, share) = (goal.p0_thousandths, goal.share_thousandths);
    let in_range =
        (1..1000).contains(&p0) && (500..1000).contains(&share) && (2..=3).contains(&goal.max_nonzeros);
    if !in_range {
        return Err(Error::InvalidArgument(format!(
            "the goal of the search is out of range: {goal:?}"
        )));
    }
    let (p0, share) = (f64::from(p0) / 1e3, f64::from(share) / 1e3);
    let source = Source {
        probabilities: [p0, (1.0 - p0) * share, (1.0 - p0) * (1.0 - share)],
    };
    let brief = goal.effort / 6 + 1;
    let tried = state_sets(p0)
        .into_iter()
        .map(|states| (Search::new(goal, source, &states).run(brief).gain, states));
    let best = tried.max_by(|a, b| a.0.total_cmp(&b.0));
    let (_, states) =
        best.ok_or_else(|| Error::InvalidArgument("no set of states suits this share of zeros".into()))?;
    let found = Search::new(goal, source, &states).run(goal.effort);
    Ok(assemble(goal, &states, &found))
}

/// The state sets to try. "The next d weights are not all zero" has a probability near one half if d is the half-life
/// of a run of zeros, so the longest promise is near it and the others are fractions of that or 1. Class sizes are
/// multiples of 32, because at most 3 bits name a class.
fn state_sets(p0: f64) -> Vec<StateSet> {
    let half_life = 0.5f64.ln() / p0.ln();
    let longest = [0.7, 1.0, 1.25].map(|factor| (half_life * factor).round().clamp(2.0, 60.0) as u8);
    let mut promises: Vec<Vec<u8>> = longest.into_iter().flat_map(promises_of).collect();
    promises.sort();
    promises.dedup();
    let with_sizes = |promises: Vec<u8>| {
        let sizes: &[&[u16]] = match promises.len() {
            3 => &[&[4, 2, 2], &[3, 3, 2], &[3, 2, 3]],
            4 => &[&[2, 2, 2, 2], &[3, 2, 2, 1], &[3, 2, 1, 2], &[3, 1, 2, 2]],
            _ => &[&[3, 2, 1, 1, 1], &[3, 1, 2, 1, 1]],
        };
        let state_set = move |sizes: &&[u16]| StateSet {
            promises: promises.clone(),
            class_sizes: sizes.iter().map(|eighths| eighths * 32).collect(),
        };
        sizes.iter().map(state_set).collect::<Vec<_>>()
    };
    promises.into_iter().flat_map(with_sizes).collect()
}

/// Sets of promises whose longest is `d`; each begins with 0, the promise of state 0.
fn promises_of(d: u8) -> Vec<Vec<u8>> {
    let mut sets = vec![vec![0, d, 1]];
    let seconds = [(4, d / 2), (6, d / 3), (5, 2), (3, 2)];
    let fitting = seconds
        .into_iter()
        .filter(|&(least, second)| d >= least && second < d);
    sets.extend(fitting.map(|(_, second)| vec![0, d, second, 1]));
    if d >= 8 {
        sets.push(vec![0, d, d / 2, d / 4, 1]);
    }
    sets.retain(|set| set[1..].is_sorted_by(|a, b| a > b));
    sets
}

/// The trees of all states, and the average number of weights per code.
struct Found {
    trees: Vec<Tree>,
    gain: f64,
}

struct Search<'a> {
    states: &'a StateSet,
    max_nonzeros: u8,
    source: Source,
    splits: Vec<Vec<Split>>,
    random: Random,
}

impl<'a> Search<'a> {
    fn new(goal: &Goal, source: Source, states: &'a StateSet) -> Search<'a> {
        let splits = splits::all(&states.promises, &source);
        Search {
            states,
            max_nonzeros: goal.max_nonzeros,
            source,
            splits,
            random: Random(goal.seed),
        }
    }

    fn run(&mut self, effort: usize) -> Found {
        let states = self.states.promises.len();
        let mut values = chain::initial_values(&self.states.promises, &self.source);
        let mut penalties = vec![vec![0.0; states]; states];
        let mut trees: Vec<Option<Tree>> = vec![None; states];
        let mut best = Found {
            trees: Vec::new(),
            gain: f64::NEG_INFINITY,
        };
        for _ in 0..ROUNDS {
            for state in 0..states {
                self.improve(state, &values, &mut penalties[state], &mut trees[state], effort);
            }
            let grown: Vec<Tree> = trees.iter().flatten().cloned().collect();
            let (gain, next) = chain::solve(&grown);
            values = next;
            if gain > best.gain {
                best = Found { trees: grown, gain };
            }
        }
        best
    }

    /// Changes a state's penalties by random steps and keeps those that give a better tree.
    fn improve(
        &mut self,
        state: usize,
        values: &[f64],
        penalties: &mut Vec<f64>,
        best: &mut Option<Tree>,
        effort: usize,
    ) {
        // One more code lengthens the average word by about this many weights.
        let unit = 1.0 / (self.source.entropy() * CODES as f64);
        let grower = Grower::new(self.states, &self.splits, values, self.max_nonzeros, MAX_LENGTH);
        let mut most = best.as_ref().map_or(f64::NEG_INFINITY, |tree| tree.value(values));
        for step in 0..effort {
            let width = unit * [0.6, 0.2, 0.05][step % 3];
            let tried: Vec<f64> = match (step, &best) {
                (0, None) => penalties.clone(),
                _ => penalties
                    .iter()
                    .map(|penalty| penalty + width * self.random.gaussian())
                    .collect(),
            };
            let tree = grower.grow(state, &tried);
            let value = tree.value(values);
            if value > most {
                (most, *penalties, *best) = (value, tried, Some(tree));
            }
        }
    }
}

fn assemble(goal: &Goal, states: &StateSet, found: &Found) -> Dictionary {
    let two_bits = states.class_sizes.iter().all(|size| size % 64 == 0);
    let words = found.trees.iter().map(|tree| {
        let mut words = vec![None; CODES];
        let mut next: Vec<u16> = (0..states.class_sizes.len())
            .map(|c| states.class_sizes[..c].iter().sum())
            .collect();
        for (word, class) in tree.words() {
            words[usize::from(next[class])] = Some(word);
            next[class] += 1;
        }
        words
    });
    Dictionary {
        p0_thousandths: goal.p0_thousandths,
        share_thousandths: goal.share_thousandths,
        expected_length: (found.gain * 1e4).round() as u32,
        max_nonzeros: goal.max_nonzeros,
        class_bits: if two_bits { 2 } else { 3 },
        promises: states.promises.clone(),
        class_sizes: states.class_sizes.clone(),
        words: words.collect(),
    }
}

/// The random numbers of the search: SplitMix64.
struct Random(u64);

impl Random {
    /// A number that is uniform in [0, 1).
    fn uniform(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 * 2f64.powi(-53)
    }

    /// An approximately normal number with mean 0 and standard deviation 1: the sum of twelve uniform ones, minus 6.
    fn gaussian(&mut self) -> f64 {
        (0..12).map(|_| self.uniform()).sum::<f64>() - 6.0
    }
}

#[cfg(test)]
mod tests {
    use moepack_core::formats::ternary::fsv8::{Encoder, Lut};

    use super::*;

    #[test]
    fn a_brief_search_comes_close_to_the_embedded_dictionaries() {
        for (p0_thousandths, max_nonzeros) in [(885, 2), (600, 3)] {
            let goal = Goal {
                p0_thousandths,
                share_thousandths: 500,
                max_nonzeros,
                effort: 3,
                seed: 1,
            };
            let found = search(&goal).unwrap();
            let embedded = Dictionary::all()
                .iter()
                .find(|d| (d.p0_thousandths, d.share_thousandths) == (p0_thousandths, 500))
                .unwrap();
            assert!(
                found.expected_length * 100 > embedded.expected_length * 99,
                "{}",
                found.expected_length
            );
            Encoder::new(&found).unwrap();
            assert!(Lut::new(&found).max_length <= u32::from(MAX_LENGTH));
            assert_eq!(search(&goal).unwrap(), found);
        }
    }

    #[test]
    fn goals_out_of_range_are_refused() {
        let goal = Goal {
            p0_thousandths: 885,
            share_thousandths: 500,
            max_nonzeros: 2,
            effort: 1,
            seed: 1,
        };
        assert!(
            search(&Goal {
                p0_thousandths: 1000,
                ..goal
            })
            .is_err()
        );
        assert!(
            search(&Goal {
                share_thousandths: 400,
                ..goal
            })
            .is_err()
        );
        assert!(
            search(&Goal {
                max_nonzeros: 4,
                ..goal
            })
            .is_err()
        );
    }
}
