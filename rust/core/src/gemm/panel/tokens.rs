//! Activations in lines: tiles of 16 tokens, chunk by chunk.

use std::ops::Range;
use std::sync::OnceLock;

use super::{LANES, Line, TokenForm};
use crate::gemm::layer::Task;

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
