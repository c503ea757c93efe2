//! Grows the tree of one state greedily: each step makes the split with the largest gain per added code.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

use moepack_core::formats::ternary::fsv8::dictionary::{CODES, Word};

use super::source::StateSet;
use super::splits::{NewLeaf, Split};

/// How often leaves without a fitting split are retried: splitting other leaves frees codes of their classes.
const MAX_RETRIES: usize = 50;

/// A node of a tree, a word and the class of its promise: a leaf until it is split.
#[derive(Debug, Clone, Copy)]
struct Node {
    length: u8,
    nonzeros: u8,
    class: usize,
    probability: f64,
    /// The index of the node that was split, and the part appended to its word.
    parent: Option<(usize, NewLeaf)>,
    split: bool,
}

/// The tree of a state.
#[derive(Debug, Clone)]
pub(super) struct Tree {
    nodes: Vec<Node>,
    /// The number of leaves of each class.
    counts: Vec<u16>,
    /// The number of all leaves.
    leaves: usize,
}

impl Tree {
    fn root(state: usize, classes: usize) -> Tree {
        let root = Node {
            length: 0,
            nonzeros: 0,
            class: state,
            probability: 1.0,
            parent: None,
            split: false,
        };
        let mut counts = vec![0; classes];
        counts[state] = 1;
        Tree {
            nodes: vec![root],
            counts,
            leaves: 1,
        }
    }

    fn leaves(&self) -> impl Iterator<Item = &Node> {
        self.nodes.iter().filter(|node| !node.split)
    }

    /// The average number of weights of the tree's words.
    pub fn expected_length(&self) -> f64 {
        self.leaves()
            .map(|leaf| leaf.probability * f64::from(leaf.length))
            .sum()
    }

    /// The probability that the next state is `class`.
    pub fn transition(&self, class: usize) -> f64 {
        self.leaves()
            .filter(|leaf| leaf.class == class)
            .map(|leaf| leaf.probability)
            .sum()
    }

    /// The expected value of a code: its weights plus the relative value of the next state.
    pub fn value(&self, values: &[f64]) -> f64 {
        self.leaves()
            .map(|leaf| leaf.probability * (f64::from(leaf.length) + values[leaf.class]))
            .sum()
    }

    /// The words and their classes.
    pub fn words(&self) -> impl Iterator<Item = (Word, usize)> + '_ {
        self.leaves().filter_map(|leaf| {
            let mut reversed = Vec::new();
            let mut node = leaf;
            while let Some((parent, appended)) = node.parent {
                reversed.extend((appended.symbol > 0).then_some(appended.symbol));
                reversed.extend(std::iter::repeat_n(0, usize::from(appended.zeros)));
                node = &self.nodes[parent];
            }
            reversed.reverse();
            Word::from_symbols(&reversed).map(|word| (word, leaf.class))
        })
    }

    fn replace(&mut self, at: usize, split: &Split) {
        let old = self.nodes[at];
        self.nodes[at].split = true;
        self.counts[old.class] -= 1;
        for &new in &split.leaves {
            self.counts[new.class] += 1;
            self.nodes.push(Node {
                length: old.length + new.length(),
                nonzeros: old.nonzeros + u8::from(new.symbol > 0),
                class: new.class,
                probability: old.probability * new.probability,
                parent: Some((at, new)),
                split: false,
            });
        }
        self.leaves += split.added();
    }
}

/// A leaf and its best split.
#[derive(Debug, Clone, Copy)]
struct Candidate {
    gain: f64,
    node: usize,
    split: usize,
}

impl Ord for Candidate {
    fn cmp(&self, other: &Self) -> Ordering {
        self.gain.total_cmp(&other.gain).then(other.node.cmp(&self.node))
    }
}

impl PartialOrd for Candidate {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Candidate {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Candidate {}

/// Grows trees for given relative values of the states.
pub(super) struct Grower<'a> {
    states: &'a StateSet,
    splits: &'a [Vec<Split>],
    /// The increase of a tree's value by each split of a leaf of probability 1.
    gains: Vec<Vec<f64>>,
    max_nonzeros: u8,
    max_length: u8,
}

impl<'a> Grower<'a> {
    pub fn new(
        states: &'a StateSet,
        splits: &'a [Vec<Split>],
        values: &[f64],
        max_nonzeros: u8,
        max_length: u8,
    ) -> Grower<'a> {
        let value = |leaf: &NewLeaf| leaf.probability * (f64::from(leaf.length()) + values[leaf.class]);
        let gain = |class: usize, split: &Split| split.leaves.iter().map(value).sum::<f64>() - values[class];
        let gains = splits
            .iter()
            .enumerate()
            .map(|(class, splits)| splits.iter().map(|split| gain(class, split)).collect())
            .collect();
        Grower {
            states,
            splits,
            gains,
            max_nonzeros,
            max_length,
        }
    }

    /// Grows the tree of a state; `penalties` are subtracted from the gains for each leaf of each class.
    pub fn grow(&self, state: usize, penalties: &[f64]) -> Tree {
        let mut tree = Tree::root(state, self.states.promises.len());
        let mut queue = BinaryHeap::new();
        let mut waiting = vec![0];
        for _ in 0..MAX_RETRIES {
            let again = std::mem::take(&mut waiting);
            again
                .into_iter()
                .for_each(|node| self.enqueue(&tree, node, penalties, &mut queue, &mut waiting));
            if queue.is_empty() {
                break;
            }
            self.split_best(&mut tree, penalties, &mut queue, &mut waiting);
        }
        tree
    }

    /// Splits leaves until none in the queue can be split.
    fn split_best(
        &self,
        tree: &mut Tree,
        penalties: &[f64],
        queue: &mut BinaryHeap<Candidate>,
        waiting: &mut Vec<usize>,
    ) {
        while tree.leaves < CODES
            && let Some(queued) = queue.pop()
        {
            // Classes have filled up since the candidate was queued, so its best split may have changed.
            let Some(best) = self.best_split(tree, queued.node, penalties) else {
                waiting.push(queued.node);
                continue;
            };
            if best.split != queued.split && best.gain < queued.gain {
                queue.push(best);
                continue;
            }
            let first = tree.nodes.len();
            tree.replace(best.node, &self.splits[tree.nodes[best.node].class][best.split]);
            (first..tree.nodes.len()).for_each(|node| self.enqueue(tree, node, penalties, queue, waiting));
        }
    }

    fn enqueue(
        &self,
        tree: &Tree,
        node: usize,
        penalties: &[f64],
        queue: &mut BinaryHeap<Candidate>,
        waiting: &mut Vec<usize>,
    ) {
        match self.best_split(tree, node, penalties) {
            Some(candidate) => queue.push(candidate),
            None => waiting.push(node),
        }
    }

    /// The split of a leaf with the largest gain per added code, among those that fit.
    fn best_split(&self, tree: &Tree, node: usize, penalties: &[f64]) -> Option<Candidate> {
        let leaf = &tree.nodes[node];
        let mut best: Option<Candidate> = None;
        for (i, split) in self.splits[leaf.class].iter().enumerate() {
            let penalty: f64 = split.leaves.iter().map(|new| penalties[new.class]).sum();
            let gain = leaf.probability * self.gains[leaf.class][i] + penalties[leaf.class] - penalty;
            let gain = gain / split.added() as f64;
            if best.is_none_or(|best| gain > best.gain) && self.fits(tree, leaf, split) {
                best = Some(Candidate { gain, node, split: i });
            }
        }
        best
    }

    fn fits(&self, tree: &Tree, leaf: &Node, split: &Split) -> bool {
        let short = usize::from(leaf.length) + usize::from(split.longest()) <= usize::from(self.max_length);
        let sparse = leaf.nonzeros < self.max_nonzeros || split.leaves[0].symbol == 0;
        let room = tree.leaves + split.added() <= CODES;
        let classes = || {
            (0..tree.counts.len()).all(|class| {
                let added = split.leaves.iter().filter(|new| new.class == class).count();
                let before = usize::from(tree.counts[class]);
                let after = before + added - usize::from(class == leaf.class);
                after <= before || after <= usize::from(self.states.class_sizes[class])
            })
        };
        short && sparse && room && classes()
    }
}
