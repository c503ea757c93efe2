//! Codebook weights as parity planes, and a token as tables of sums.
//!
//! A function of b bits is a sum over their parities (Walsh and Hadamard): with p_S(k) the parity of the bits of k that
//! the mask S holds, `c[k] = c[0] + sum over S != 0 of a_S p_S(k)`, whatever the centroids are. So a row's product is
//! that of 2^b - 1 binary rows, of which only the b planes of single bits are stored: kernels make the others by XOR.
//!
//! Stored planes, for tiles of as many rows as a register has bytes: for each 8 columns b registers, one a bit; in a
//! row's byte the low four bits are those of the first four columns. Even bytes are rows of the tile's first half.

use rayon::ThreadPool;
use rayon::prelude::*;

/// Columns that one look-up covers.
pub const GROUP: usize = 4;

/// Columns whose looked-up bytes, at most 60 each, are added before they are widened.
pub const STEP: usize = 4 * GROUP;

/// Most columns whose sums fit 16 bits: each step adds at most 240.
pub const MAX_COLUMNS: usize = 65_535 / 240 * STEP;

/// Rows of codes with a codebook each.
pub struct Rows {
    pub bits: usize,
    pub rows: usize,
    pub columns: usize,
    /// rows x columns codes.
    pub codes: Vec<u8>,
    /// rows x 2^bits centroids.
    pub centroids: Vec<i16>,
    /// A scale a row.
    pub scales: Vec<f32>,
}

impl Rows {
    /// What a code of a row stands for.
    pub fn weight(&self, row: usize, code: usize) -> f64 {
        f64::from(self.centroids[(row << self.bits) + code]) * f64::from(self.scales[row])
    }
}

/// Rows in tiles of `tile`.
#[derive(Clone)]
pub struct Planes {
    pub bits: usize,
    pub columns: usize,
    pub tile: usize,
    /// Tiles x columns / 8 x bits x tile bytes.
    pub codes: Vec<u8>,
    /// Tiles x (2^bits + 1) x tile: c[0], the row's sum of weights, and the coefficients of the masks from 1.
    pub parameters: Vec<f32>,
}

impl Planes {
    /// Rows and columns must fill tiles and steps.
    pub fn new(source: &Rows, tile: usize, pool: &ThreadPool) -> Planes {
        let (bits, columns) = (source.bits, source.columns);
        assert!(source.rows.is_multiple_of(tile) && columns.is_multiple_of(STEP) && columns <= MAX_COLUMNS);
        let mut codes = vec![0; source.rows * columns / 8 * bits];
        let mut parameters = vec![0.0; source.rows * ((1 << bits) + 1)];
        let tiles = codes.par_chunks_exact_mut(tile * columns / 8 * bits);
        let tiles = tiles.zip(parameters.par_chunks_exact_mut(tile * ((1 << bits) + 1)));
        pool.install(|| {
            tiles.enumerate().for_each(|(index, (codes, parameters))| {
                for place in 0..tile {
                    let row = index * tile + place;
                    let byte = place % (tile / 2) * 2 + place / (tile / 2);
                    for column in 0..columns {
                        let code = source.codes[row * columns + column];
                        for bit in 0..bits {
                            let at = (column / 8 * bits + bit) * tile + byte;
                            codes[at] |= (code >> bit & 1) << (column % 8);
                        }
                    }
                    for (i, value) in coefficients(source, row).into_iter().enumerate() {
                        parameters[i * tile + place] = value as f32;
                    }
                }
            });
        });
        Planes {
            bits,
            columns,
            tile,
            codes,
            parameters,
        }
    }

    /// Bytes that a product reads.
    pub fn bytes(&self) -> usize {
        self.codes.len() + size_of_val(&self.parameters[..])
    }
}

/// A row's parameters.
fn coefficients(source: &Rows, row: usize) -> Vec<f64> {
    let clusters = 1usize << source.bits;
    let codes = &source.codes[row * source.columns..][..source.columns];
    let sum = codes.iter().map(|&code| source.weight(row, code.into())).sum();
    let signed = |mask: usize, code: usize| match (mask & code).count_ones() % 2 {
        0 => source.weight(row, code),
        _ => -source.weight(row, code),
    };
    let transform = |mask| (0..clusters).map(|code| signed(mask, code)).sum::<f64>() / clusters as f64;
    let masks = (1..clusters).map(|mask| -2.0 * transform(mask));
    [source.weight(row, 0), sum].into_iter().chain(masks).collect()
}

/// A token rounded to 8 bits, `x ~ step * (q - zero)`.
pub struct Token {
    pub step: f32,
    pub zero: f32,
    pub codes: Vec<u8>,
    /// For each group of columns two tables of 16 sums: of the low and of the high four bits of the chosen codes.
    pub tables: Vec<[[u8; 16]; 2]>,
    /// The sum of all codes.
    pub sum: f32,
}

impl Token {
    /// Rounds as the product's integer modes do.
    pub fn new(x: &[f32]) -> Token {
        let (low, high) = x.iter().fold((0f32, 0f32), |(l, h), &x| (l.min(x), h.max(x)));
        let step = (high - low) / 255.0;
        let inverse = 1.0 / step;
        let zero = (-low * inverse + 0.5).floor();
        let code = |&x: &f32| (x * inverse + (zero + 0.5)).clamp(0.0, 255.0) as u8;
        let codes: Vec<u8> = x.iter().map(code).collect();
        let sum = codes.iter().map(|&q| u32::from(q)).sum::<u32>() as f32;
        let tables = codes.as_chunks().0.iter().map(tables).collect();
        Token {
            step,
            zero,
            codes,
            tables,
            sum,
        }
    }
}

/// The sums of every choice of a group's codes.
fn tables(codes: &[u8; GROUP]) -> [[u8; 16]; 2] {
    let mut sums = [[0; 16]; 2];
    for (i, &code) in codes.iter().enumerate() {
        for (sums, part) in sums.iter_mut().zip([code & 15, code >> 4]) {
            for choice in 0..1 << i {
                sums[choice | 1 << i] = sums[choice] + part;
            }
        }
    }
    sums
}
