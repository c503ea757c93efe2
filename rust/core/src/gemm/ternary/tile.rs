//! Prepared activations: f32, transposed so that a position's values for a block of tokens are neighbours, followed
//! by the zeros that decoding may read after the last column.
//!
//! For one token the vector kernels read *steps*, three floats per position: `0, 0, x`, so that two neighbouring
//! floats are (0, 0), (x, 0) or (0, x), as [`super::table`] explains.

use super::Kernel;
use super::table::{STEP, longest_word};
use crate::formats::ternary::{Code, TernaryView};
use crate::types::Activations;

/// The maximum number of lanes of a token block: with more, the values of wide rows exceed the second-level cache
/// (6,144 columns of 64 lanes are 1.5 MB, and 64 tokens take twice the time).
const MAX_LANES: usize = 32;

/// The maximum number of tokens, as one block, for which codes are multiplied without a list.
const MAX_ON_THE_FLY: usize = 32;

/// The number of codes between two checks of the position when multiplying by a token block.
pub(super) const BLOCK_ROUND: usize = 8;

/// The number of codes between two checks of the position when multiplying by one token.
const STEP_ROUND: usize = 16;

/// The alignment of a tile in bytes: a cache line, so that the values of 16 tokens never straddle two.
const ALIGNMENT: usize = 64;

/// A block of tokens: `lanes` values at each position; the first `tokens` are used.
#[derive(Debug, Clone, Copy)]
pub struct TokenBlock {
    /// The first token of the block, counted in the tile.
    pub token: usize,
    pub tokens: usize,
    pub lanes: usize,
    start: usize,
}

/// The activations of one expert's tokens.
pub struct Tile {
    data: Vec<f32>,
    /// The start of the tile in `data`, a multiple of [`ALIGNMENT`].
    offset: usize,
    columns: usize,
    positions: usize,
    longest_word: usize,
    tokens: usize,
    /// Whether the tile holds one token as steps.
    steps: bool,
    blocks: Vec<TokenBlock>,
}

impl Tile {
    /// Copies tokens of `x` into the layout that `kernel` reads.
    pub fn new(kernel: Kernel, view: &TernaryView, x: Activations, list: &[usize]) -> Tile {
        let (columns, longest_word, tokens) = (view.columns(), longest_word(view), list.len());
        let steps = tokens == 1 && kernel != Kernel::SCALAR;
        let on_the_fly = tokens <= MAX_ON_THE_FLY && kernel != Kernel::SCALAR && view.code() == Code::Fsv8;
        let words = match (steps, on_the_fly) {
            (true, _) => STEP_ROUND + 1,
            (_, true) => BLOCK_ROUND + 1,
            // Lists and the portable kernel check the position after every word.
            _ => 1,
        };
        let positions = columns + words * longest_word + 1;
        let blocks = match steps {
            true => vec![TokenBlock::new(0, 1, STEP, 0)],
            false => blocks(tokens, positions),
        };
        let size = blocks.last().map_or(0, |b| b.start + b.lanes * positions);
        let data = vec![0.0f32; size + ALIGNMENT / 4];
        let offset = data.as_ptr().align_offset(ALIGNMENT).min(ALIGNMENT / 4);
        let mut tile = Tile {
            data,
            offset,
            columns,
            positions,
            longest_word,
            tokens,
            steps,
            blocks,
        };
        for i in 0..tile.blocks.len() {
            tile.fill(i, x, list);
        }
        tile
    }

    fn fill(&mut self, i: usize, x: Activations, list: &[usize]) {
        let block = self.blocks[i];
        let columns = self.columns;
        // The activation is the last float of a step.
        let shift = if self.steps { STEP - 1 } else { 0 };
        let mut row = vec![0.0; columns];
        let out = &mut self.data[self.offset + block.start..][..block.lanes * self.positions];
        for lane in 0..block.tokens {
            let from = list[block.token + lane] * columns;
            let places = out[lane + shift..].iter_mut().step_by(block.lanes);
            x.widen(from, &mut row);
            places.zip(&row).for_each(|(place, &value)| *place = value);
        }
    }

    /// The number of tokens.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// The token blocks in order.
    pub fn blocks(&self) -> &[TokenBlock] {
        &self.blocks
    }

    /// The values of a block: positions x lanes.
    #[inline(always)]
    pub fn values(&self, block: &TokenBlock) -> &[f32] {
        &self.data[self.offset + block.start..][..block.lanes * self.positions]
    }

    /// Whether the tile holds one token as steps of three floats.
    pub fn is_steps(&self) -> bool {
        self.steps
    }

    /// The values of a block, followed by zeros for `words` words after the last column.
    ///
    /// # Panics
    /// If there are fewer zeros.
    #[inline(always)]
    pub fn padded_values(&self, block: &TokenBlock, words: usize) -> &[f32] {
        assert!(self.positions > self.columns + words * self.longest_word);
        self.values(block)
    }

    /// The steps of one token, followed by zeros for `words` words and one position after the last column.
    ///
    /// # Panics
    /// If the tile does not hold steps or has fewer zeros.
    #[inline(always)]
    pub fn padded_steps(&self, words: usize) -> &[f32] {
        assert!(self.steps);
        self.padded_values(&self.blocks[0], words)
    }
}

impl TokenBlock {
    fn new(token: usize, tokens: usize, lanes: usize, start: usize) -> TokenBlock {
        TokenBlock {
            token,
            tokens,
            lanes,
            start,
        }
    }
}

/// Divides tokens into blocks whose numbers of lanes are powers of two; a single token is a block of one lane.
fn blocks(tokens: usize, positions: usize) -> Vec<TokenBlock> {
    if tokens == 1 {
        return vec![TokenBlock::new(0, 1, 1, 0)];
    }
    let (mut blocks, mut token, mut start) = (Vec::new(), 0, 0);
    while token < tokens {
        let lanes = match tokens - token {
            1..=4 => 4,
            5..=8 => 8,
            9..=16 => 16,
            _ => MAX_LANES,
        };
        let taken = lanes.min(tokens - token);
        blocks.push(TokenBlock::new(token, taken, lanes, start));
        token += taken;
        start += lanes * positions;
    }
    blocks
}
