//! The shape of a tensor of experts.

/// The shape of a packed or dense tensor: a matrix, or a stack of one matrix per expert.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    /// E, 1 for a matrix.
    pub experts: usize,
    /// R, the rows (output channels) of one expert.
    pub rows: usize,
    /// C, the columns (input channels).
    pub columns: usize,
    /// The number of axes that the user sees: 2 for a matrix, 3 for a stack of experts.
    pub ndim: u8,
}

impl Shape {
    /// The number of rows of all experts; `None` on overflow.
    pub fn all_rows(&self) -> Option<usize> {
        self.experts.checked_mul(self.rows)
    }

    /// The number of weights of all experts; `None` on overflow.
    pub fn weights(&self) -> Option<usize> {
        self.all_rows()?.checked_mul(self.columns)
    }

    /// Returns whether the number of axes fits the experts: a matrix has one expert, a stack any number.
    pub fn has_valid_ndim(&self) -> bool {
        matches!((self.ndim, self.experts), (2, 1) | (3, _))
    }
}
