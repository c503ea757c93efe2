//! Code lookup in the integer kernels for 3 and 4 bits: the rows' codebooks are tables, and codes are indices.

use super::lanes::Lanes;
use crate::formats::codebook::bits::{LANE, REGISTER};
use crate::formats::codebook::{Block, PANEL};

/// The prefetch distance in bytes: more than memory delivers within its latency, which is 4 KB at 30 GB/s per core
/// and 130 ns. Zen 5, 4 bits, one thread and token, cold: 1.5 KB 985 us, 3 KB 927, 6 KB 828.
pub(super) const AHEAD: usize = 6144;

/// The rows' codebooks for each byte of the centroids, 16 entries each; those of 2 bits as stored, 64 entries
/// together.
#[repr(align(64))]
pub(super) struct Tables<const BYTES: usize>(pub [[[u8; LANE]; PANEL]; BYTES]);

impl<const BYTES: usize> Tables<BYTES> {
    /// The codebooks of a block with `BITS` bits, which is a constant because copies of unknown length would be
    /// calls.
    #[inline(always)]
    pub fn new<const BITS: u8>(block: &Block) -> Self {
        let mut tables = [[[0; LANE]; PANEL]; BYTES];
        for (byte, tables) in tables.iter_mut().enumerate() {
            let clusters = 1 << BITS;
            if BITS == 2 {
                tables.as_flattened_mut()[..REGISTER].copy_from_slice(block.plane(byte));
                continue;
            }
            for (table, centroids) in tables.iter_mut().zip(block.plane(byte).chunks_exact(clusters)) {
                table[..clusters].copy_from_slice(centroids);
            }
        }
        Tables(tables)
    }
}

/// The codes of a group of 16 columns as bytes, from a quad's registers of a step.
///
/// # Safety
/// The processor supports the set of `V`; `at` is valid for loads of a quad's registers.
#[inline(always)]
pub(super) unsafe fn indices<V: Lanes, const BITS: u8>(at: *const u8, group: usize) -> V::Int {
    // SAFETY: a quad has three registers of 3-bit codes, or one of others; only these are loaded.
    unsafe {
        match (BITS, group) {
            (3, 6 | 7) => {
                let low = V::shift(V::load(at.add((group - 6) * REGISTER)), 6);
                let high = V::shift(V::load(at.add(2 * REGISTER)), group as i32 - 2);
                V::mask(V::blend(low, high, 3), 7)
            }
            (3, _) if group % 2 == 1 => V::mask(V::shift(V::load(at.add(group / 2 * REGISTER)), 3), 7),
            (3, _) => V::mask(V::load(at.add(group / 2 * REGISTER)), 7),
            (_, 0) => V::mask(V::load(at), (1 << BITS) - 1),
            _ => V::mask(
                V::shift(V::load(at), i32::from(BITS) * group as i32),
                (1 << BITS) - 1,
            ),
        }
    }
}
