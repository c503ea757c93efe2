//! Lookup of lines of 2-bit codes in registers with AVX-512.
//!
//! The bytes of a line are permuted into words, one per row: byte k of row r's word holds the codes of columns k, 4 +
//! k, 8 + k and 12 + k, low bits in its low half. Bits c and 4 + c of all bytes are thus the codes of four
//! neighbouring columns, and together with four bits for the byte's row they index the 64 centroids of 16 rows.
//!
//! Of the six bits of an index that a permutation reads, the codes of columns 0 to 3 (and, shifted by 2, those of
//! columns 8 to 11) are bits 0 and 4, those of columns 4 to 7 (12 to 15) bits 1 and 5. The table is therefore kept in
//! two orders, and a line of 256 codes takes one shift, five permutations and four bit selections.

use std::arch::x86_64::*;

use crate::formats::codebook::bits::{LANE, QUADS, REGISTER};
use crate::formats::codebook::{Block, PANEL};

/// The bits of a line's byte that hold a code, for both orders of the table; other bits hold the row.
const CODES: [u8; 2] = [0x11, 0x22];

/// The bytes of a register.
#[repr(align(64))]
pub(super) struct Bytes(pub [u8; REGISTER]);

/// The number of a row, in the index bits that hold no code in order `which` of the table.
const fn selector(which: usize, row: u8) -> u8 {
    match which {
        0 => (row & 7) << 1 | (row >> 3) << 5,
        _ => row & 1 | (row >> 1) << 2,
    }
}

/// The permutation of a line's bytes into words of rows: word i holds row `4 (i % 4) + i / 4` if `transposed`, else
/// row i.
const fn gather(transposed: bool) -> Bytes {
    let mut bytes = [0; REGISTER];
    let mut i = 0;
    while i < REGISTER {
        bytes[i] = (i % 4 * LANE + row(transposed, i / 4)) as u8;
        i += 1;
    }
    Bytes(bytes)
}

/// The row of word `word`.
const fn row(transposed: bool, word: usize) -> usize {
    if transposed { word % 4 * 4 + word / 4 } else { word }
}

/// The row bits of the indices of all words, in order `which` of the table.
const fn selectors(transposed: bool, which: usize) -> Bytes {
    let mut bytes = [0; REGISTER];
    let mut i = 0;
    while i < REGISTER {
        bytes[i] = selector(which, row(transposed, i / 4) as u8);
        i += 1;
    }
    Bytes(bytes)
}

/// The permutation of the rows' centroids, four per row, into order `which` of the table.
const fn entries(which: usize) -> Bytes {
    let mut bytes = [0; REGISTER];
    let (mut row, mut code) = (0, 0);
    while row < PANEL as u8 {
        let entry = selector(which, row) | (code & 1 | (code >> 1) << 4) << which;
        bytes[entry as usize] = 4 * row + code;
        code = (code + 1) % 4;
        if code == 0 {
            row += 1;
        }
    }
    Bytes(bytes)
}

static GATHER: [Bytes; 2] = [gather(false), gather(true)];
static SELECTORS: [[Bytes; 2]; 2] = [
    [selectors(false, 0), selectors(false, 1)],
    [selectors(true, 0), selectors(true, 1)],
];
static ENTRIES: [Bytes; 2] = [entries(0), entries(1)];

#[inline]
#[target_feature(enable = "avx512f")]
fn load(bytes: &[u8; REGISTER]) -> __m512i {
    // SAFETY: the array has the 64 bytes; the load needs no alignment.
    unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) }
}

/// The constants that convert lines to indices, for one order of the rows.
#[derive(Clone, Copy)]
pub(super) struct Order {
    gather: __m512i,
    selectors: [__m512i; 2],
}

impl Order {
    /// The order of rows 0 to 15 or, if `transposed`, of rows 0, 4, 8, 12, 1, 5, ...
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub fn new(transposed: bool) -> Order {
        let selectors = &SELECTORS[usize::from(transposed)];
        Order {
            gather: load(&GATHER[usize::from(transposed)].0),
            selectors: [load(&selectors[0].0), load(&selectors[1].0)],
        }
    }

    /// Permutes a line into words, one per row.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
    pub fn words(&self, line: &[u8; REGISTER]) -> __m512i {
        _mm512_permutexvar_epi8(self.gather, load(line))
    }

    /// The indices of columns 4c to 4c + 3, for c from 0 to 3, from the words of a line.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
    pub fn indices(&self, words: __m512i) -> [__m512i; 4] {
        let later = _mm512_srli_epi16::<2>(words);
        let (even, odd) = (_mm512_set1_epi8(CODES[0] as i8), _mm512_set1_epi8(CODES[1] as i8));
        // The code bits of the words, or the row bits.
        [
            _mm512_ternarylogic_epi32::<0xEA>(words, even, self.selectors[0]),
            _mm512_ternarylogic_epi32::<0xEA>(words, odd, self.selectors[1]),
            _mm512_ternarylogic_epi32::<0xEA>(later, even, self.selectors[0]),
            _mm512_ternarylogic_epi32::<0xEA>(later, odd, self.selectors[1]),
        ]
    }
}

/// The 64 high or low bytes of the centroids of 16 rows, in both orders.
#[derive(Clone, Copy)]
pub(super) struct Table([__m512i; 2]);

impl Table {
    /// The table of the high bytes (`byte` 0) or the low bytes (1) of a 2-bit block.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
    pub fn new(block: &Block, byte: usize) -> Table {
        Table::of(block.plane(byte).first_chunk().unwrap_or(&[0; REGISTER]))
    }

    /// The table of the centroids of 16 rows, four per row.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
    pub fn of(centroids: &[u8; REGISTER]) -> Table {
        let centroids = load(centroids);
        Table([
            _mm512_permutexvar_epi8(load(&ENTRIES[0].0), centroids),
            _mm512_permutexvar_epi8(load(&ENTRIES[1].0), centroids),
        ])
    }

    /// The centroids of columns 4c to 4c + 3, from [`Order::indices`]: four signed bytes in each row's word.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
    pub fn look_up(&self, indices: &[__m512i; 4], c: usize) -> __m512i {
        _mm512_permutexvar_epi8(indices[c], self.0[c % 2])
    }
}

/// Converts a block's codes to words of 16 columns, 16 rows per line: the code of column j is in bits `2 (j / 4) + 8
/// (j % 4)` and the next.
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
pub(in crate::gemm::codebook) fn row_words(block: &Block, out: &mut Vec<[u32; PANEL]>) {
    // The four bits of half a byte, spread to the even bits of a byte.
    let spread: [u8; LANE] = [0, 1, 4, 5, 16, 17, 20, 21, 64, 65, 68, 69, 80, 81, 84, 85];
    // SAFETY: the array has the 16 bytes.
    let low = _mm512_broadcast_i32x4(unsafe { _mm_loadu_si128(spread.as_ptr().cast()) });
    let (high, order) = (_mm512_add_epi8(low, low), Order::new(false));
    let half = _mm512_set1_epi8(15);
    out.clear();
    out.resize(block.registers().len(), [0; PANEL]);
    for (line, out) in block.registers().iter().zip(out) {
        let words = order.words(line);
        let lows = _mm512_shuffle_epi8(low, _mm512_and_si512(words, half));
        let highs = _mm512_shuffle_epi8(high, _mm512_and_si512(_mm512_srli_epi16::<4>(words), half));
        // SAFETY: 16 words are 64 bytes.
        unsafe { _mm512_storeu_si512(out.as_mut_ptr().cast(), _mm512_or_si512(lows, highs)) };
    }
}

/// The right shifts that extract the code of each of the 16 columns from a word of [`row_words`].
#[inline]
#[target_feature(enable = "avx512f")]
pub(in crate::gemm::codebook) fn column_shifts() -> __m512i {
    _mm512_setr_epi32(0, 8, 16, 24, 2, 10, 18, 26, 4, 12, 20, 28, 6, 14, 22, 30)
}

/// The centroids of a line, from those of 16 rows, four per row: word r of register c holds columns 4 c to 4 c + 3 of
/// row `4 (r % 4) + r / 4`.
///
/// # Safety
/// Both pointers are valid for reads of 64 bytes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
pub(in crate::gemm::codebook) unsafe fn centroids(line: *const u8, table: *const u8) -> [__m512i; QUADS] {
    // SAFETY: the caller guarantees 64 readable bytes at both addresses; arrays of bytes need no alignment.
    let (line, table) = unsafe { (&*line.cast(), &*table.cast()) };
    let (order, table) = (Order::new(true), Table::of(table));
    let indices = order.indices(order.words(line));
    let mut words = [_mm512_setzero_si512(); QUADS];
    for (c, words) in words.iter_mut().enumerate() {
        *words = table.look_up(&indices, c);
    }
    words
}
