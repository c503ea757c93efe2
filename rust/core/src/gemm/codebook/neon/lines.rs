//! Products by 2-bit codes: lookups of centroids and dot products.
//!
//! The bytes of a line are zipped into words, one per row: byte k of row r's word holds the codes of columns k, 4 + k,
//! 8 + k and 12 + k, low bits in its low half ([`crate::formats::codebook::bits`]). Shifted right by c, bits 0 and 4
//! are thus the code of column 4 c + k. Together with the number of the row among the four rows of a register, in bits
//! 1 and 2, they index a table of 32 bytes, of which 16 are the rows' centroids. A line of 256 codes takes 8 zips, 12
//! shifts, 16 selections and 16 lookups per byte of the centroids, and 16 dot products per byte and token. The lanes
//! of a sum are rows, so sums need no transposition.

use std::arch::aarch64::*;

use crate::formats::codebook::bits::{LANE, QUAD, QUADS, REGISTER};
use crate::formats::codebook::{Block, PANEL};
use crate::gemm::codebook::kernel::AHEAD;
use crate::gemm::codebook::tokens::Prepared;
use crate::gemm::codebook::{Epilogue, Rows};
use crate::gemm::neon;

/// The bits of an index that hold a code.
const CODE: u8 = 0x11;

/// The row bits of the indices of a register.
static ROWS: [u8; LANE] = {
    let (mut bytes, mut i) = ([0; LANE], 0);
    while i < LANE {
        bytes[i] = 2 * (i / 4) as u8;
        i += 1;
    }
    bytes
};

/// For each entry of a table, the place of its centroid among those of four rows, four per row.
static ENTRIES: [u8; 2 * LANE] = {
    let (mut bytes, mut row) = ([u8::MAX; 2 * LANE], 0);
    while row < QUAD {
        let mut code = 0;
        while code < 4 {
            bytes[2 * row + (code & 1) + 16 * (code >> 1)] = (4 * row + code) as u8;
            code += 1;
        }
        row += 1;
    }
    bytes
};

/// Adds the products of a 2-bit block, whose first column is `first`, with `tokens` to `out`.
///
/// # Safety
/// The processor has NEON, with dot products if `DOT_PRODUCTS`.
#[inline(always)]
pub(super) unsafe fn multiply<const DOT_PRODUCTS: bool, const BYTES: usize>(
    block: &Block,
    first: usize,
    prepared: &Prepared,
    tokens: &[usize],
    out: &mut Rows,
) {
    for line in (0..block.parameter_bytes()).step_by(REGISTER) {
        neon::prefetch(block.start().wrapping_add(AHEAD + line));
    }
    let epilogue = Epilogue::<BYTES>::new(block);
    let columns = first..first + block.columns();
    let mut done = 0;
    macro_rules! tile {
        ($tokens:literal) => {{
            let mut x = [std::ptr::null(); $tokens];
            for t in 0..$tokens {
                x[t] = prepared.codes(tokens[done + t])[columns.clone()].as_ptr();
            }
            // SAFETY: the slices have the block's columns; the caller guarantees the features.
            let sums = unsafe { sums::<DOT_PRODUCTS, BYTES, $tokens>(block, x) };
            for t in 0..$tokens {
                let products = epilogue.products(&sums[t], prepared.scale(tokens[done + t]));
                out.add(done + t, &products);
            }
            done += $tokens;
        }};
    }
    while done < tokens.len() {
        match (tokens.len() - done).min(4 / BYTES) {
            4 => tile!(4),
            3 => tile!(3),
            2 => tile!(2),
            _ => tile!(1),
        }
    }
}

/// The integer sums of 16 rows for `N` tokens and each byte of the centroids.
///
/// # Safety
/// The processor has NEON, with dot products if `DOT_PRODUCTS`; each of `x` points to as many bytes as the block has
/// columns.
#[inline(always)]
unsafe fn sums<const DOT_PRODUCTS: bool, const BYTES: usize, const N: usize>(
    block: &Block,
    x: [*const u8; N],
) -> [[[i32; PANEL]; BYTES]; N] {
    // SAFETY: the caller guarantees NEON. A line has 64 bytes and stands for 16 of the block's columns, which each of `x`
    // has; the constants have a register's bytes, or two; 16 sums are four registers.
    unsafe {
        let (rows, code) = (vld1q_u8(ROWS.as_ptr()), vdupq_n_u8(CODE));
        let mut tables = [[uint8x16x2_t(code, code); QUADS]; BYTES];
        for byte in 0..BYTES {
            for quad in 0..QUADS {
                tables[byte][quad] = table(block.plane(byte).as_chunks().0[quad]);
            }
        }
        let mut sums = [[[vdupq_n_s32(0); QUADS]; BYTES]; N];
        for (number, line) in block.registers().iter().enumerate() {
            neon::prefetch(line.as_ptr().wrapping_add(AHEAD));
            let words = words(line);
            let mut four = [vdupq_n_s8(0); N];
            for t in 0..N {
                four[t] = vld1q_s8(x[t].add(number * LANE).cast());
            }
            for quad in 0..QUADS {
                macro_rules! columns {
                    ($c:literal) => {
                        let index = neon::select(code, neon::shift_bytes(words[quad], $c), rows);
                        for byte in 0..BYTES {
                            let weights = vreinterpretq_s8_u8(vqtbl2q_u8(tables[byte][quad], index));
                            for t in 0..N {
                                let sum = &mut sums[t][byte][quad];
                                *sum = neon::dot_word::<DOT_PRODUCTS, true, $c>(*sum, weights, four[t]);
                            }
                        }
                    };
                }
                columns!(0);
                columns!(1);
                columns!(2);
                columns!(3);
            }
        }
        let mut out = [[[0; PANEL]; BYTES]; N];
        for t in 0..N {
            for byte in 0..BYTES {
                for quad in 0..QUADS {
                    vst1q_s32(out[t][byte].as_mut_ptr().add(QUAD * quad), sums[t][byte][quad]);
                }
            }
        }
        out
    }
}

/// The table of the centroids of four rows, four per row.
#[inline]
#[target_feature(enable = "neon")]
fn table(centroids: [u8; LANE]) -> uint8x16x2_t {
    // SAFETY: the arrays have a register's bytes, and two.
    unsafe {
        let centroids = vld1q_u8(centroids.as_ptr());
        let places = [vld1q_u8(ENTRIES.as_ptr()), vld1q_u8(ENTRIES.as_ptr().add(LANE))];
        uint8x16x2_t(vqtbl1q_u8(centroids, places[0]), vqtbl1q_u8(centroids, places[1]))
    }
}

/// The words of the rows of a line, those of four rows in each register.
#[inline]
#[target_feature(enable = "neon")]
fn words(line: &[u8; REGISTER]) -> [uint8x16_t; QUADS] {
    // SAFETY: a line has 64 bytes.
    let uint8x16x4_t(a, b, c, d) = unsafe { vld1q_u8_x4(line.as_ptr()) };
    let zip = |a, b| [vzip1q_u8(a, b), vzip2q_u8(a, b)].map(|bytes| vreinterpretq_u16_u8(bytes));
    let ([ab, ab_high], [cd, cd_high]) = (zip(a, b), zip(c, d));
    [
        vreinterpretq_u8_u16(vzip1q_u16(ab, cd)),
        vreinterpretq_u8_u16(vzip2q_u16(ab, cd)),
        vreinterpretq_u8_u16(vzip1q_u16(ab_high, cd_high)),
        vreinterpretq_u8_u16(vzip2q_u16(ab_high, cd_high)),
    ]
}
