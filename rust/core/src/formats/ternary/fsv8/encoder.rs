//! Encodes a row: a table-driven walk over the gaps between its non-zeros.
//!
//! Within a state the words form a complete parse, so exactly one word fits any continuation, and the greedy parse is
//! the shortest. A walk starts at the root of a state and reads the gap, the number of zeros before the next non-zero
//! weight. The gap alone determines the action: either the word ends within the gap (with a promise that the rest of
//! the gap keeps), or the word includes that non-zero and the walk moves to a child node. A word has at most three
//! non-zeros, so a code costs at most four lookups, regardless of the number of weights it stands for.

use std::sync::OnceLock;

use super::dictionary::{COUNT, Dictionary, Word};
use crate::{Error, Result};

/// This bit marks an action that ends a word. The other bits: 0-7 the code, 8-15 the weights to advance by, 16-30 the
/// next node. An action without this bit takes the non-zero at the end of the gap into the word; the next node is
/// that of symbol 1, and the node after it that of symbol 2.
const END: u32 = 1 << 31;

fn action(end: u32, node: usize, advance: u8, code: u8) -> u32 {
    end | (node as u32) << 16 | u32::from(advance) << 8 | u32::from(code)
}

/// A node of the walk: the start of its actions by gap, and the gap whose action also applies to all larger ones.
#[derive(Debug, Clone, Copy, Default)]
struct Node {
    first: u32,
    last: u32,
}

/// The tables that encode rows with one dictionary.
#[derive(Debug)]
pub struct Encoder {
    /// The roots of the states come first.
    nodes: Vec<Node>,
    actions: Vec<u32>,
}

/// A word of a state, its code and the next state.
struct Item {
    word: Word,
    code: u8,
    next: usize,
}

/// The words that begin with the same `depth` non-zeros, the last of them just before `start`. Gaps here are shorter
/// than `promise` unless it is 0.
struct Branch {
    items: Vec<Item>,
    depth: usize,
    start: u8,
    promise: u8,
}

impl Encoder {
    /// Builds the tables.
    ///
    /// # Errors
    /// [`Error::Corruption`] if the words of a state are not a complete parse: some weights would fit no word or two.
    pub fn new(dictionary: &Dictionary) -> Result<Encoder> {
        let states = dictionary.states();
        let mut encoder = Encoder {
            nodes: vec![Node::default(); states],
            actions: Vec::new(),
        };
        for (state, words) in dictionary.words.iter().enumerate() {
            let items = words.iter().enumerate().filter_map(|(code, word)| {
                let code = code as u8;
                word.map(|word| Item {
                    word,
                    code,
                    next: dictionary.class_of(code),
                })
            });
            let branch = Branch {
                items: items.collect(),
                depth: 0,
                start: 0,
                promise: dictionary.promises[state],
            };
            encoder.grow(state, branch, &dictionary.promises)?;
        }
        Ok(encoder)
    }

    /// Returns the tables of an embedded dictionary, which are built on first use.
    ///
    /// # Panics
    /// If `id` is not below [`COUNT`].
    pub fn embedded(id: usize) -> &'static Encoder {
        static ALL: [OnceLock<Encoder>; COUNT] = [const { OnceLock::new() }; COUNT];
        ALL[id].get_or_init(|| {
            Encoder::new(&Dictionary::all()[id]).expect("the embedded dictionaries are complete parses")
        })
    }

    fn grow(&mut self, node: usize, branch: Branch, promises: &[u8]) -> Result<()> {
        let Branch {
            items,
            depth,
            start,
            promise,
        } = branch;
        let (ends, longer): (Vec<Item>, Vec<Item>) = items
            .into_iter()
            .partition(|item| item.word.nonzeros().count() == depth);
        let open_end = ends
            .iter()
            .find(|item| promises[item.next] == 0)
            .map(|item| item.word.length - start);
        let last = promise
            .checked_sub(1)
            .or(open_end)
            .ok_or_else(|| incomplete("no word for a long gap"))?;
        let mut actions = vec![None; usize::from(last) + 1];
        for item in &ends {
            let taken = item.word.length - start;
            let gaps = match promises[item.next] {
                0 => taken..=last,
                promise => taken..=last.min(taken.saturating_add(promise - 1)),
            };
            let action = action(END, item.next, taken, item.code);
            gaps.into_iter()
                .try_for_each(|gap| set(&mut actions, gap, action))?;
        }
        for (gap, children) in by_gap(longer, depth, start) {
            let child = self.nodes.len();
            self.nodes.extend([Node::default(); 2]);
            set(&mut actions, gap, action(0, child, gap + 1, 0))?;
            for (symbol, items) in children.into_iter().enumerate() {
                let branch = Branch {
                    items,
                    depth: depth + 1,
                    start: start + gap + 1,
                    promise: 0,
                };
                self.grow(child + symbol, branch, promises)?;
            }
        }
        self.nodes[node] = Node {
            first: self.actions.len() as u32,
            last: u32::from(last),
        };
        for action in actions {
            self.actions
                .push(action.ok_or_else(|| incomplete("a gap fits no word"))?);
        }
        Ok(())
    }

    /// Encodes a row of `columns` weights, at least one, into the beginning of `out` and returns the number of codes.
    ///
    /// `nonzeros` holds `position << 1 | positive` of each non-zero weight in order, followed by [`super::SENTINEL`]
    /// twice; `swapped` is 0 if symbol 1 stands for the negative level and 1 if it stands for the positive one; `out`
    /// is longer than `columns`.
    pub fn encode(&self, nonzeros: &[u32], columns: u32, swapped: u32, out: &mut [u8]) -> usize {
        // The kind of the next action is unpredictable, so both kinds take the same instructions, without a branch.
        let (mut at, mut count) = (0, 0);
        let mut node = self.nodes[0];
        let (mut nonzero, mut following, mut next) = (nonzeros[0], nonzeros[1], 1);
        loop {
            let gap = (nonzero >> 1) - at;
            let action = self.actions[(node.first + node.last.min(gap)) as usize];
            let end = action >> 31;
            let symbol = (nonzero ^ swapped) & 1 & !end;
            node = self.nodes[((action >> 16 & 0x7fff) + symbol) as usize];
            at += action >> 8 & 0xff;
            out[count] = action as u8;
            count += end as usize;
            next += 1 - end as usize;
            // `if end == 0 { following } else { nonzero }`, which would be compiled to a branch.
            nonzero = following ^ ((following ^ nonzero) & end.wrapping_neg());
            following = nonzeros[next];
            if (at >= columns) & (end != 0) {
                return count;
            }
        }
    }
}

fn set(actions: &mut [Option<u32>], gap: u8, action: u32) -> Result<()> {
    match actions.get_mut(usize::from(gap)) {
        Some(place @ None) => *place = Some(action),
        _ => return Err(incomplete("a gap fits two words")),
    }
    Ok(())
}

/// Groups words by the gap before their non-zero number `depth`, then by the symbol of that non-zero.
fn by_gap(items: Vec<Item>, depth: usize, start: u8) -> std::collections::BTreeMap<u8, [Vec<Item>; 2]> {
    let mut children = std::collections::BTreeMap::<u8, [Vec<Item>; 2]>::new();
    for item in items {
        if let Some((position, symbol)) = item.word.nonzeros().nth(depth) {
            children.entry(position - start).or_default()[usize::from(symbol) - 1].push(item);
        }
    }
    children
}

fn incomplete(why: &str) -> Error {
    Error::Corruption(format!("FSV8 dictionary is not a complete parse: {why}"))
}
