//! Activations as the kernels read them: f32, transposed so that a position's values for a block of tokens are
//! neighbours, followed by the zeros that decoding may touch after the last column.

use super::{Activations, Kernel};
use crate::ternary::TernaryView;

/// The most tokens of a block.
pub(super) const MAX_LANES: usize = 64;

/// Alignment of a tile in bytes: a cache line, so that blocks of 16 tokens never straddle two.
const ALIGNMENT: usize = 64;

/// A block of tokens: `lanes` values at each position, of which the first `tokens` are used.
#[derive(Debug, Clone, Copy)]
pub(super) struct Block {
    /// The first of the block's tokens, counted in the tile.
    pub token: usize,
    pub tokens: usize,
    pub lanes: usize,
    start: usize,
}

/// The activations of one expert's tokens.
pub(super) struct Tile {
    data: Vec<f32>,
    /// The tile starts here in `data`, at a multiple of [`ALIGNMENT`].
    offset: usize,
    positions: usize,
    tokens: usize,
    blocks: Vec<Block>,
}

impl Tile {
    /// Brings `tokens` tokens of `x`, from `first` on, into the layout that `kernel` wants.
    pub fn new(_kernel: Kernel, view: &TernaryView, x: Activations, first: usize, tokens: usize) -> Tile {
        let columns = view.columns();
        let positions = columns + 1;
        let blocks = blocks(tokens, positions);
        let size = blocks.last().map_or(0, |b| b.start + b.lanes * positions);
        let data = vec![0.0f32; size + ALIGNMENT / 4];
        let offset = data.as_ptr().align_offset(ALIGNMENT).min(ALIGNMENT / 4);
        let mut tile = Tile {
            data,
            offset,
            positions,
            tokens,
            blocks,
        };
        for i in 0..tile.blocks.len() {
            tile.fill(i, x, first, columns);
        }
        tile
    }

    fn fill(&mut self, i: usize, x: Activations, first: usize, columns: usize) {
        let block = self.blocks[i];
        let out = &mut self.data[self.offset + block.start..][..block.lanes * self.positions];
        for lane in 0..block.tokens {
            let from = (first + block.token + lane) * columns;
            for (column, place) in out[lane..]
                .iter_mut()
                .step_by(block.lanes)
                .take(columns)
                .enumerate()
            {
                *place = x.get(from + column);
            }
        }
    }

    /// The number of tokens.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// The blocks of tokens, in order.
    pub fn blocks(&self) -> &[Block] {
        &self.blocks
    }

    /// The values of a block: positions x lanes.
    #[inline(always)]
    pub fn values(&self, block: &Block) -> &[f32] {
        &self.data[self.offset + block.start..][..block.lanes * self.positions]
    }
}

/// Cuts tokens into blocks whose numbers of lanes are powers of two.
fn blocks(tokens: usize, positions: usize) -> Vec<Block> {
    let (mut blocks, mut token, mut start) = (Vec::new(), 0, 0);
    while token < tokens {
        let left = tokens - token;
        // 40 tokens are 32 + 8: rounding up to 64 would cost more.
        let lanes = match left {
            1 => 1,
            2..=4 => 4,
            5..=8 => 8,
            9..=16 => 16,
            17..=31 => 16,
            32..=63 => 32,
            _ => MAX_LANES,
        };
        let tokens = left.min(lanes);
        blocks.push(Block {
            token,
            tokens,
            lanes,
            start,
        });
        token += tokens;
        start += lanes * positions;
    }
    blocks
}
