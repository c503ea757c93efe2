//! The costs of the lengths of 16 rows' indices, as tables in which vectors look up.

use super::BLOCK_ROWS as ROWS;
use crate::simd::Isa;

/// The maximum number of lengths of a list.
pub(super) const MOST_INDICES: usize = ROOM - 1;
/// The room for a list.
const ROOM: usize = 128;
/// The size of a table: a power of two, so that a mask keeps places within it.
const TABLE: usize = ROWS * ROOM;

pub(super) struct Lists {
    /// The costs of indices, by list and index.
    outer: Box<[f32; TABLE]>,
    /// The costs of the next index of the same parity towards zero, by list and index.
    inner: Box<[f32; TABLE]>,
    /// The start of each row's list. Rows of a run share a list, so that most groups of rows read a single one.
    starts: [i32; ROWS],
    /// The place of index 0 in a list.
    middle: i32,
}

impl Lists {
    /// The costs for the runs of up to 16 rows.
    ///
    /// `lengths` are the bits of `indices` indices by run; an odd number from 5 to [`MOST_INDICES`].
    pub fn new(runs: &[i64], lengths: &[f32], indices: usize, price: f32) -> Lists {
        let table = || Box::new([0.0; TABLE]);
        let (mut outer, mut inner, mut starts) = (table(), table(), [0; ROWS]);
        let (mut known, middle) = (Vec::new(), indices / 2);
        for (start, &run) in starts.iter_mut().zip(runs) {
            let list = known
                .iter()
                .position(|&other| other == run)
                .unwrap_or(known.len());
            *start = (ROOM * list) as i32;
            if list < known.len() {
                continue;
            }
            known.push(run);
            let costs: Vec<f32> = lengths[run as usize * indices..][..indices]
                .iter()
                .map(|bits| price * bits)
                .collect();
            outer[ROOM * list..][..indices].copy_from_slice(&costs);
            for (place, inner) in inner[ROOM * list..][..indices].iter_mut().enumerate() {
                *inner = costs[if place > middle { place - 2 } else { place + 2 }];
            }
        }
        let middle = middle as i32;
        Lists {
            outer,
            inner,
            starts,
            middle,
        }
    }

    /// The costs of an index of each row, and of the next one of its parity towards zero. The ends include all beyond.
    #[inline(always)]
    pub fn costs(&self, isa: Isa, indices: &[i32; ROWS]) -> [[f32; ROWS]; 2] {
        let mut places = [0; ROWS];
        for i in 0..ROWS {
            let last = if indices[i] > self.middle {
                self.middle
            } else {
                indices[i]
            };
            let place = if last < -self.middle {
                0
            } else {
                last + self.middle
            };
            places[i] = self.starts[i] + place;
        }
        [&self.outer, &self.inner].map(|table| look_up(isa, table, &places))
    }
}

/// The numbers of a table at some places, modulo its size.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn look_up(isa: Isa, table: &[f32; TABLE], places: &[i32; ROWS]) -> [f32; ROWS] {
    super::x86::look_up(isa, table, places).unwrap_or_else(|| look_up_one_by_one(table, places))
}

/// The numbers of a table at some places, modulo its size.
#[cfg(not(target_arch = "x86_64"))]
#[inline(always)]
fn look_up(_: Isa, table: &[f32; TABLE], places: &[i32; ROWS]) -> [f32; ROWS] {
    look_up_one_by_one(table, places)
}

#[inline(always)]
fn look_up_one_by_one(table: &[f32; TABLE], places: &[i32; ROWS]) -> [f32; ROWS] {
    places.map(|place| table[place as usize % TABLE])
}
