//! What multiplies a panel by tiles of tokens.

use super::{LANES, Line, Square};
use crate::simd::{self, Isa};

/// The products that a processor has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Backend {
    /// Matrix registers: AMX.
    Matrix,
    /// AVX-512 with dot products of bf16.
    Avx512,
    /// Vectors of f32 that AVX2 expands bf16 to.
    Avx2,
    /// Loops over f32.
    Portable,
    /// Loops that do what matrix registers do.
    #[cfg(test)]
    Emulated,
}

impl Backend {
    /// The products of bf16 on a set that the processor runs. `None` on AVX-512 without bf16, whose products of f32 or of
    /// bytes straight from the codes are faster than any of bf16.
    pub fn of_floats(isa: Isa) -> Option<Backend> {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Amx => Some(Backend::Matrix),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => is_x86_feature_detected!("avx512bf16").then_some(Backend::Avx512),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => Some(Backend::Avx2),
            _ => Some(Backend::Portable),
        }
    }

    /// As [`Backend::of_floats`], for a format whose exact mode has integer dot products: `None`, too, where these are the
    /// faster ones. So they are on AVX2 that has them, and on AVX-512 of Intel, which starts twice as many of them as dot
    /// products of bf16: 256 tokens by 14336 x 4096 in int4 took 175 ms exactly and 289 by panels.
    pub fn of_bf16(isa: Isa) -> Option<Backend> {
        let integers = match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => is_x86_feature_detected!("avxvnni"),
            Isa::Avx512 => !simd::is_amd(),
            _ => false,
        };
        if integers { None } else { Backend::of_floats(isa) }
    }

    /// Whether sums may stay where they are from one product to the next, in registers.
    pub fn keeps_sums(self) -> bool {
        match self {
            Backend::Matrix => true,
            #[cfg(test)]
            Backend::Emulated => true,
            _ => false,
        }
    }

    /// The set of its vectors.
    pub fn vectors(self) -> Isa {
        match self {
            Backend::Matrix | Backend::Avx512 => Isa::Avx512,
            Backend::Avx2 => Isa::Avx2,
            Backend::Portable => Isa::Scalar,
            #[cfg(test)]
            Backend::Emulated if Isa::Avx512.available() => Isa::Avx512,
            #[cfg(test)]
            Backend::Emulated => Isa::Scalar,
        }
    }
}

/// Where sums start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Start {
    /// At zero.
    Zero,
    /// At what is stored.
    Stored,
    /// Where the product before ended, of the same blocks and tile: only of a backend that keeps them.
    Kept,
}

/// One or two blocks by a tile, over the chunks of a step.
pub(super) struct Product<'a> {
    /// The lines of the tile.
    pub tokens: &'a [Line],
    /// How many tokens there are, at most 16.
    pub count: usize,
    /// The first block's lines, the second's `block_lines` behind.
    pub panel: &'a [Line],
    pub block_lines: usize,
    /// Blocks, 1 or 2.
    pub blocks: usize,
    pub chunks: usize,
    /// What the products are added to.
    pub start: Start,
    /// Whether `sums` are wanted: always, but where the next product starts from [`Start::Kept`].
    pub store: bool,
    /// The sums of the blocks.
    pub sums: &'a mut [Square<u32>],
    /// Squares from a block's sums to the next block's.
    pub block_sums: usize,
}

impl Product<'_> {
    /// Stops the program where the lengths do not fit: kernels rely on them.
    pub fn check(&self) {
        let lines = self.chunks * LANES;
        assert!(self.chunks > 0 && (1..=2).contains(&self.blocks) && (1..=LANES).contains(&self.count));
        assert!(self.tokens.len() >= lines);
        assert!(self.panel.len() >= (self.blocks - 1) * self.block_lines + lines);
        assert!(self.sums.len() > (self.blocks - 1) * self.block_sums);
    }

    /// The line of a token at chunk `chunk`.
    #[inline(always)]
    pub fn token(&self, token: usize, chunk: usize) -> &Line {
        &self.tokens[chunk * LANES + token]
    }

    /// The sums of a token and a block.
    #[inline(always)]
    pub fn row(&mut self, token: usize, block: usize) -> &mut [u32; LANES] {
        &mut self.sums[block * self.block_sums].0[token]
    }
}

/// The bits of a f32 rounded to bf16, to nearest, ties to even; NaN stays NaN.
#[inline(always)]
pub(crate) fn bf16(x: f32) -> u32 {
    let bits = x.to_bits();
    match x.is_nan() {
        true => bits >> 16 | 0x40,
        false => bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16,
    }
}

/// Two f32 rounded to bf16.
#[inline(always)]
pub(crate) fn pair(low: f32, high: f32) -> u32 {
    bf16(low) | bf16(high) << 16
}

/// The values of a word.
#[inline(always)]
pub(super) fn values(word: u32) -> [f32; 2] {
    [f32::from_bits(word << 16), f32::from_bits(word & 0xffff_0000)]
}

/// Products of bf16, one after the other. A product of two bf16 numbers is exact, so that fusing it with the addition
/// changes nothing.
pub(super) fn multiply_portable(product: &mut Product) {
    let (blocks, count) = (product.blocks, product.count);
    for (block, token) in (0..blocks).flat_map(|b| (0..count).map(move |t| (b, t))) {
        let mut sums = match product.start == Start::Zero {
            true => [0.0; LANES],
            false => product.row(token, block).map(f32::from_bits),
        };
        for chunk in 0..product.chunks {
            let words = product.token(token, chunk).0;
            let lines = &product.panel[block * product.block_lines + chunk * LANES..][..LANES];
            for (word, line) in words.into_iter().zip(lines) {
                let x = values(word);
                for (sum, &weights) in sums.iter_mut().zip(&line.0) {
                    let [even, odd] = values(weights);
                    *sum += even * x[0];
                    *sum += odd * x[1];
                }
            }
        }
        *product.row(token, block) = sums.map(f32::to_bits);
    }
}

/// What matrix registers compute, whole tiles at a time.
#[cfg(test)]
pub(super) fn multiply_emulated(element: super::Element, product: &mut Product) {
    let (blocks, count, chunks) = (product.blocks, LANES, product.chunks);
    if element == super::Element::Bf16 {
        product.count = count;
        return multiply_portable(product);
    }
    for (block, token) in (0..blocks).flat_map(|b| (0..count).map(move |t| (b, t))) {
        let mut sums = match product.start == Start::Zero {
            true => [0; LANES],
            false => *product.row(token, block),
        };
        for (chunk, word) in (0..chunks).flat_map(|c| (0..LANES).map(move |w| (c, w))) {
            let x = product.token(token, chunk).0[word].to_le_bytes();
            let line = &product.panel[block * product.block_lines + chunk * LANES + word];
            for (sum, weights) in sums.iter_mut().zip(line.0) {
                let terms = weights.to_le_bytes().into_iter().zip(x);
                let dot: i32 = terms.map(|(w, x)| i32::from(w as i8) * i32::from(x)).sum();
                *sum = sum.wrapping_add(dot as u32);
            }
        }
        *product.row(token, block) = sums;
    }
}
