//! Where threads put their outputs: disjoint places of one array.

use std::marker::PhantomData;
use std::ops::Range;

use crate::groupwise::BLOCK_ROWS;

/// An array tokens x rows that several threads fill, each its own rows.
pub(super) struct Output<'a> {
    values: *mut f32,
    len: usize,
    rows: usize,
    borrow: PhantomData<&'a mut [f32]>,
}

// SAFETY: the array is borrowed mutably for the life of `Output`, and writers keep to disjoint places: see `write`.
unsafe impl Sync for Output<'_> {}

impl<'a> Output<'a> {
    pub fn new(values: &'a mut [f32], rows: usize) -> Output<'a> {
        Output {
            values: values.as_mut_ptr(),
            len: values.len(),
            rows,
            borrow: PhantomData,
        }
    }

    /// Writes rows `rows` (at most 16) of a token.
    ///
    /// # Safety
    /// No two threads write the same row of the same token at the same time.
    pub unsafe fn write(&self, token: usize, rows: Range<usize>, values: &[f32; BLOCK_ROWS]) {
        let at = token * self.rows + rows.start;
        let values = &values[..rows.len()];
        assert!(rows.end <= self.rows && at + values.len() <= self.len);
        // SAFETY: the place is inside of the array by the assertion, and nobody else's by the caller's promise.
        unsafe { std::ptr::copy_nonoverlapping(values.as_ptr(), self.values.add(at), values.len()) }
    }
}
