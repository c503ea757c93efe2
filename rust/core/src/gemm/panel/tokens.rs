//! Prepared activations: tiles of 16 tokens.

use std::ops::Range;
use std::sync::OnceLock;

use super::{LANES, Line, TokenForm};
use crate::gemm::layer::Task;

/// The lines of up to sixteen tokens; those of missing tokens are zero.
pub(crate) struct Tile {
    /// The lines, [chunks, 16 tokens].
    pub lines: Vec<Line>,
    /// The step and the zero point of each token, if tokens are quantized to integers.
    pub scales: [(f32, i32); LANES],
    /// The number of tokens.
    pub count: usize,
}

/// The tiles of a job.
pub(super) struct Tokens {
    pub form: TokenForm,
    /// The tiles, with the expert and the range of the job's places that they hold.
    tiles: Vec<(usize, Range<usize>, OnceLock<Tile>)>,
    /// The tiles of each task.
    of_task: Vec<Range<usize>>,
}

impl Tokens {
    /// Empty tiles for the places of tasks.
    pub fn new(tasks: &[Task], form: TokenForm) -> Tokens {
        let (mut tiles, mut of_task) = (Vec::new(), Vec::new());
        for Task { expert, places } in tasks {
            let first = tiles.len();
            let starts = places.clone().step_by(LANES);
            tiles.extend(starts.map(|start| {
                let places = start..(start + LANES).min(places.end);
                (*expert, places, OnceLock::new())
            }));
            of_task.push(first..tiles.len());
        }
        Tokens { form, tiles, of_task }
    }

    /// The number of chunks of a token.
    pub fn chunks(&self) -> usize {
        self.form.columns.div_ceil(self.form.element.columns())
    }

    /// The number of tiles.
    pub fn len(&self) -> usize {
        self.tiles.len()
    }

    /// Fills a tile; `fill(expert, place, lane, tile)` writes the token at a place of the job, which belongs to an
    /// expert, into a lane.
    pub fn make(&self, tile: usize, fill: impl Fn(usize, usize, usize, &mut Tile)) {
        let (expert, places, slot) = &self.tiles[tile];
        slot.get_or_init(|| {
            let mut tile = Tile {
                lines: vec![Line::ZERO; self.chunks() * LANES],
                scales: [(0.0, 0); LANES],
                count: places.len(),
            };
            let lanes = places.clone().enumerate();
            lanes.for_each(|(lane, place)| fill(*expert, place, lane, &mut tile));
            tile
        });
    }

    /// The tiles of a task, which must have been filled.
    pub fn of_task(&self, task: usize) -> Vec<&Tile> {
        let tiles = &self.tiles[self.of_task[task].clone()];
        let tiles = tiles.iter().map(|(_, _, slot)| slot.get());
        tiles
            .map(|tile| tile.expect("the first stage has filled the tile"))
            .collect()
    }
}
