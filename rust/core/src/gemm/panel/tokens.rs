//! Activations in lines: tiles of 16 tokens, chunk by chunk.

use std::ops::Range;
use std::sync::OnceLock;

use super::{LANES, Line, TokenForm};
use crate::gemm::hadamard;
use crate::gemm::layer::Task;
use crate::simd::Isa;
use crate::types::Activations;

/// Sixteen tokens; those that do not exist are zeros.
pub(crate) struct Tile {
    /// [chunks, 16 tokens].
    pub lines: Vec<Line>,
    /// Of each token, what a unit of its integers is worth and which of them is zero, where it is quantized.
    pub units: [(f32, i32); LANES],
    /// How many tokens there are.
    pub count: usize,
}

/// The tokens of some tasks.
pub(super) struct Tokens {
    pub form: TokenForm,
    /// Tiles, and which places of the job they hold.
    tiles: Vec<(Range<usize>, OnceLock<Tile>)>,
    of_task: Vec<Range<usize>>,
}

impl Tokens {
    /// Tiles to be made, of the tasks' places.
    pub fn new(tasks: &[Task], form: TokenForm) -> Tokens {
        let (mut tiles, mut of_task) = (Vec::new(), Vec::new());
        for Task { places, .. } in tasks {
            let first = tiles.len();
            let starts = places.clone().step_by(LANES);
            tiles.extend(starts.map(|start| (start..(start + LANES).min(places.end), OnceLock::new())));
            of_task.push(first..tiles.len());
        }
        Tokens { form, tiles, of_task }
    }

    /// Chunks of a token.
    pub fn chunks(&self) -> usize {
        self.form.columns.div_ceil(self.form.element.columns())
    }

    /// How many tiles there are to be made.
    pub fn len(&self) -> usize {
        self.tiles.len()
    }

    /// Makes a tile; `fill` writes the token at a place of the job into a lane of it.
    pub fn make(&self, tile: usize, fill: impl Fn(usize, usize, &mut Tile)) {
        let (places, slot) = &self.tiles[tile];
        slot.get_or_init(|| {
            let mut tile = Tile {
                lines: vec![Line::ZERO; self.chunks() * LANES],
                units: [(0.0, 0); LANES],
                count: places.len(),
            };
            let lanes = places.clone().enumerate();
            lanes.for_each(|(lane, place)| fill(place, lane, &mut tile));
            tile
        });
    }

    /// The tiles of a task, which have been made.
    pub fn of_task(&self, task: usize) -> Vec<&Tile> {
        let tiles = &self.tiles[self.of_task[task].clone()];
        let tiles = tiles.iter().map(|(_, slot)| slot.get());
        tiles
            .map(|tile| tile.expect("the first stage has made it"))
            .collect()
    }
}

/// Writes token `token` of `x`, of `columns` values rounded to bf16, into lane `lane` of a tile. Of a tensor whose
/// products turn activations ([`hadamard`]), `turned` columns at a time are turned first. `isa` must have been found
/// available.
pub(crate) fn round_token(
    isa: Isa,
    x: &Activations,
    (token, columns, turned): (usize, usize, usize),
    lane: usize,
    tile: &mut Tile,
) {
    let mut values = vec![0.0; columns];
    x.widen(token * columns, &mut values);
    if turned > 1 {
        hadamard::rotate(isa, &mut values, turned);
    }
    round(isa, &values, &mut tile.lines[lane..]);
}

/// Writes values, rounded to bf16, into lines that are 16 apart. `isa` must have been found available.
pub(super) fn round(isa: Isa, x: &[f32], lines: &mut [Line]) {
    match isa {
        // SAFETY: `Isa::require` has found the set.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 | Isa::Avx512 => unsafe { super::x86::round(x, lines) },
        _ => round_portable(x, lines),
    }
}

/// As [`round`].
#[inline(always)]
pub(super) fn round_portable(x: &[f32], lines: &mut [Line]) {
    for (x, line) in x.chunks(2 * LANES).zip(lines.iter_mut().step_by(LANES)) {
        let mut values = [0.0; 2 * LANES];
        values[..x.len()].copy_from_slice(x);
        for (word, pair) in line.0.iter_mut().zip(values.as_chunks::<2>().0) {
            *word = super::pair(pair[0], pair[1]);
        }
    }
}
