//! The products that a kernel computes at a time: some row groups of an expert with its tokens.

use std::ops::Range;

use super::tile::Tile;
use crate::formats::ternary::TernaryView;
use crate::formats::ternary::layout::GROUP_ROWS;

/// Row groups of one expert, computed by one thread.
pub(super) struct Unit<'a> {
    pub view: &'a TernaryView<'a>,
    pub expert: usize,
    pub groups: Range<usize>,
    pub tile: &'a Tile,
}

impl Unit<'_> {
    /// The rows of the unit, counted in the expert.
    pub fn rows(&self) -> Range<usize> {
        self.groups.start * GROUP_ROWS..(self.groups.end * GROUP_ROWS).min(self.view.rows())
    }

    /// The levels of a row.
    #[inline(always)]
    pub fn levels(&self, row: usize) -> (f32, f32) {
        self.view.levels(self.expert * self.view.rows() + row)
    }
}

/// The maximum number of row groups of a unit, so that its list of rows stays in the cache.
const MOST_GROUPS: usize = 8;
/// The maximum number of row groups of a unit times tokens, so that their outputs, of 64 rows each, stay in the
/// first-level cache.
const MOST_OUTPUTS: usize = 64;

/// The number of row groups of a unit.
pub(super) fn unit_groups(tokens: usize) -> usize {
    (MOST_OUTPUTS / tokens.max(1)).clamp(1, MOST_GROUPS)
}
