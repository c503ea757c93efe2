//! Where threads put their outputs: disjoint places of one array.

use std::marker::PhantomData;
use std::ops::Range;

/// An array places x rows that several threads fill, each its own.
pub(super) struct Output<'a> {
    values: *mut f32,
    len: usize,
    rows: usize,
    borrow: PhantomData<&'a mut [f32]>,
}

// SAFETY: the array is borrowed mutably for the life of `Output`; writers keep to disjoint places, and readers come after
// them: see `write` and `values`.
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

    /// Writes rows `rows` of a place.
    ///
    /// # Safety
    /// While this runs, no other thread writes the same row of the same place, and none reads [`Output::values`].
    pub unsafe fn write(&self, place: usize, rows: Range<usize>, values: &[f32]) {
        let at = place * self.rows + rows.start;
        let values = &values[..rows.len()];
        assert!(rows.end <= self.rows && at + values.len() <= self.len);
        // SAFETY: the place is inside of the array by the assertion, and nobody else's by the caller's promise.
        unsafe { std::ptr::copy_nonoverlapping(values.as_ptr(), self.values.add(at), values.len()) }
    }

    /// All that has been written.
    ///
    /// # Safety
    /// No thread writes while the slice lives, and all writes are visible to this thread.
    pub unsafe fn values(&self) -> &[f32] {
        // SAFETY: pointer and length are those of the borrowed array; nobody writes by the caller's promise.
        unsafe { std::slice::from_raw_parts(self.values, self.len) }
    }
}
