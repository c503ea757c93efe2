//! An output array that threads fill: each unit of work writes its own part, once.
//!
//! Writing is unsafe, because the caller must guarantee that the parts of units are disjoint. Reading is safe: it
//! panics until every unit has been filled, after which no more writes are possible.

use std::cell::Cell;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

enum Cells<'a> {
    Borrowed(&'a [Cell<f32>]),
    Owned(Box<[Cell<f32>]>),
}

/// An array of places x rows that several threads fill.
pub(crate) struct Output<'a> {
    cells: Cells<'a>,
    rows: usize,
    /// For each unit, whether a thread has taken it.
    taken: Vec<AtomicBool>,
    /// The number of units not yet filled.
    left: AtomicUsize,
}

// SAFETY: a cell is only written by `fill`, by the one thread that took its unit; by the contract of `fill` no other
// unit shares the cell. It is only read by `values`, which has seen all units filled (their decrements of `left`
// release, its load acquires), after which every unit is taken and no cell is written.
unsafe impl Sync for Output<'_> {}

// SAFETY: the cells are exclusively borrowed or owned, and no field is bound to a thread.
unsafe impl Send for Output<'_> {}

impl<'a> Output<'a> {
    /// An array borrowed from the caller, with `rows` rows per place, filled by `units` units.
    pub fn new(values: &'a mut [f32], rows: usize, units: usize) -> Output<'a> {
        Output::of(
            Cells::Borrowed(Cell::from_mut(values).as_slice_of_cells()),
            rows,
            units,
        )
    }

    /// An owned array.
    pub fn owned(places: usize, rows: usize, units: usize) -> Output<'a> {
        let cells = vec![Cell::new(0.0); places * rows];
        Output::of(Cells::Owned(cells.into_boxed_slice()), rows, units)
    }

    fn of(cells: Cells<'a>, rows: usize, units: usize) -> Output<'a> {
        Output {
            cells,
            rows,
            taken: (0..units).map(|_| AtomicBool::new(false)).collect(),
            left: AtomicUsize::new(units),
        }
    }

    /// The rows of a place.
    pub fn rows(&self) -> usize {
        self.rows
    }

    fn cells(&self) -> &[Cell<f32>] {
        match &self.cells {
            Cells::Borrowed(cells) => cells,
            Cells::Owned(cells) => cells,
        }
    }

    /// Fills a unit: writes `values`, places x rows, to rows `rows` of places `places`.
    ///
    /// # Panics
    /// If the unit has been filled, or its range lies outside of the array.
    ///
    /// # Safety
    /// No other unit of this array is filled with any of these rows of any of these places.
    pub unsafe fn fill(&self, unit: usize, places: Range<usize>, rows: Range<usize>, values: &[f32]) {
        assert!(!self.taken[unit].swap(true, Ordering::Relaxed) && rows.end <= self.rows);
        for (place, values) in places.zip(values.chunks_exact(rows.len().max(1))) {
            let cells = &self.cells()[place * self.rows..][rows.clone()];
            cells
                .iter()
                .zip(values)
                .for_each(|(cell, &value)| cell.set(value));
        }
        self.left.fetch_sub(1, Ordering::Release);
    }

    /// Returns all values, places x rows.
    ///
    /// # Panics
    /// If a unit has not been filled.
    pub fn values(&self) -> &[f32] {
        assert_eq!(
            self.left.load(Ordering::Acquire),
            0,
            "some units have not been filled"
        );
        let cells = self.cells();
        // SAFETY: cells have the layout of their values; all units have been filled, so no cell is written from now
        // on.
        unsafe { std::slice::from_raw_parts(cells.as_ptr().cast(), cells.len()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_array_is_read_when_all_units_are_filled() {
        let output = Output::owned(2, 3, 2);
        // SAFETY: the units' rows differ.
        unsafe {
            output.fill(1, 0..2, 1..3, &[1.0, 2.0, 3.0, 4.0]);
            assert!(
                std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| output.values().len())).is_err()
            );
            output.fill(0, 0..2, 0..1, &[5.0, 6.0]);
        }
        assert_eq!(output.values(), [5.0, 1.0, 2.0, 6.0, 3.0, 4.0]);
    }

    #[test]
    #[should_panic]
    fn a_unit_is_filled_once() {
        let output = Output::owned(1, 2, 2);
        // SAFETY: the second call panics before it writes.
        unsafe {
            output.fill(0, 0..1, 0..1, &[1.0]);
            output.fill(0, 0..1, 0..1, &[1.0]);
        }
    }
}
