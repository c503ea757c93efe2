//! Growing the tree of one state: the split that gains most for each code it takes, again and again.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

use super::super::dictionary::{CODES, Word};
use super::Plan;
use super::splits::{Part, Split};

/// How often leaves that found no split are looked at again; classes free up when their leaves are split.
const MAX_RETRIES: usize = 50;

/// A leaf: a word and the class of its promise.
#[derive(Debug, Clone, Copy)]
struct Leaf {
    length: u8,
    nonzeros: u8,
    class: usize,
    probability: f64,
    /// The leaf that it came from and what was added, by their place among all that ever were.
    parent: Option<(usize, Part)>,
    split: bool,
}

/// The tree of a state.
#[derive(Debug, Clone)]
pub(super) struct Tree {
    /// All leaves that ever were; those that were split are inner nodes now.
    nodes: Vec<Leaf>,
    counts: Vec<u16>,
    leaves: usize,
}

impl Tree {
    fn root(state: usize, classes: usize) -> Tree {
        let root = Leaf {
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

    fn leaves(&self) -> impl Iterator<Item = &Leaf> {
        self.nodes.iter().filter(|node| !node.split)
    }

    /// The weights that its words stand for on average.
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

    /// What a code of this tree yields on average: its weights and the worth of the next state.
    pub fn value(&self, worths: &[f64]) -> f64 {
        self.leaves()
            .map(|leaf| leaf.probability * (f64::from(leaf.length) + worths[leaf.class]))
            .sum()
    }

    /// The words and their classes.
    pub fn words(&self) -> impl Iterator<Item = (Word, usize)> + '_ {
        self.leaves().filter_map(|leaf| {
            let mut reversed = Vec::new();
            let mut node = leaf;
            while let Some((parent, part)) = node.parent {
                reversed.extend((part.symbol > 0).then_some(part.symbol));
                reversed.extend(std::iter::repeat_n(0, usize::from(part.zeros)));
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
        for &part in &split.parts {
            self.counts[part.class] += 1;
            self.nodes.push(Leaf {
                length: old.length + part.zeros + u8::from(part.symbol > 0),
                nonzeros: old.nonzeros + u8::from(part.symbol > 0),
                class: part.class,
                probability: old.probability * part.probability,
                parent: Some((at, part)),
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

/// What all trees of a round have in common.
pub(super) struct Grower<'a> {
    plan: &'a Plan,
    splits: &'a [Vec<Split>],
    /// What each split gains for a leaf of probability 1.
    gains: Vec<Vec<f64>>,
    max_nonzeros: u8,
    max_length: u8,
}

impl<'a> Grower<'a> {
    pub fn new(
        plan: &'a Plan,
        splits: &'a [Vec<Split>],
        worths: &[f64],
        max_nonzeros: u8,
        max_length: u8,
    ) -> Grower<'a> {
        let worth = |part: &Part| {
            part.probability
                * (f64::from(part.zeros) + f64::from(u8::from(part.symbol > 0)) + worths[part.class])
        };
        let gain = |class: usize, split: &Split| split.parts.iter().map(worth).sum::<f64>() - worths[class];
        let gains = splits
            .iter()
            .enumerate()
            .map(|(class, splits)| splits.iter().map(|split| gain(class, split)).collect())
            .collect();
        Grower {
            plan,
            splits,
            gains,
            max_nonzeros,
            max_length,
        }
    }

    /// Grows the tree of a state; `prices` are paid for the leaves of each class.
    pub fn grow(&self, state: usize, prices: &[f64]) -> Tree {
        let mut tree = Tree::root(state, self.plan.promises.len());
        let mut queue = BinaryHeap::new();
        let mut waiting = vec![0];
        for _ in 0..MAX_RETRIES {
            let again = std::mem::take(&mut waiting);
            again
                .into_iter()
                .for_each(|node| self.enqueue(&tree, node, prices, &mut queue, &mut waiting));
            if queue.is_empty() {
                break;
            }
            self.split_best(&mut tree, prices, &mut queue, &mut waiting);
        }
        tree
    }

    /// Splits leaves until none in the queue can be split.
    fn split_best(
        &self,
        tree: &mut Tree,
        prices: &[f64],
        queue: &mut BinaryHeap<Candidate>,
        waiting: &mut Vec<usize>,
    ) {
        while tree.leaves < CODES
            && let Some(queued) = queue.pop()
        {
            // Classes have filled up since the candidate was queued, so its best split may be another one now.
            let Some(best) = self.best_split(tree, queued.node, prices) else {
                waiting.push(queued.node);
                continue;
            };
            if best.split != queued.split && best.gain < queued.gain {
                queue.push(best);
                continue;
            }
            let first = tree.nodes.len();
            tree.replace(best.node, &self.splits[tree.nodes[best.node].class][best.split]);
            (first..tree.nodes.len()).for_each(|node| self.enqueue(tree, node, prices, queue, waiting));
        }
    }

    fn enqueue(
        &self,
        tree: &Tree,
        node: usize,
        prices: &[f64],
        queue: &mut BinaryHeap<Candidate>,
        waiting: &mut Vec<usize>,
    ) {
        match self.best_split(tree, node, prices) {
            Some(candidate) => queue.push(candidate),
            None => waiting.push(node),
        }
    }

    /// The split of a leaf that gains most for each code, among those that fit.
    fn best_split(&self, tree: &Tree, node: usize, prices: &[f64]) -> Option<Candidate> {
        let leaf = &tree.nodes[node];
        let mut best: Option<Candidate> = None;
        for (i, split) in self.splits[leaf.class].iter().enumerate() {
            let paid: f64 = split.parts.iter().map(|part| prices[part.class]).sum();
            let gain = leaf.probability * self.gains[leaf.class][i] + prices[leaf.class] - paid;
            let gain = gain / split.added() as f64;
            if best.is_none_or(|best| gain > best.gain) && self.fits(tree, leaf, split) {
                best = Some(Candidate { gain, node, split: i });
            }
        }
        best
    }

    fn fits(&self, tree: &Tree, leaf: &Leaf, split: &Split) -> bool {
        let short = usize::from(leaf.length) + usize::from(split.longest()) <= usize::from(self.max_length);
        let plain = leaf.nonzeros < self.max_nonzeros || split.parts[0].symbol == 0;
        let room = tree.leaves + split.added() <= CODES;
        let classes = || {
            (0..tree.counts.len()).all(|class| {
                let added = split.parts.iter().filter(|part| part.class == class).count();
                let before = usize::from(tree.counts[class]);
                let after = before + added - usize::from(class == leaf.class);
                after <= before || after <= usize::from(self.plan.class_sizes[class])
            })
        };
        short && plain && room && classes()
    }
}
