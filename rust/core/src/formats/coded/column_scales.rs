//! The kinds of column scales.

/// The kind of a tensor's column scales.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ColumnScales {
    /// No column scales.
    None,
    /// One row of C for all experts.
    Shared,
    /// A row of C for each expert.
    OfExpert,
}

impl ColumnScales {
    /// All kinds, in the order of their numbers in the header.
    const ALL: [ColumnScales; 3] = [ColumnScales::None, ColumnScales::Shared, ColumnScales::OfExpert];

    /// The kind for a byte of the header; `None` if the byte is invalid.
    pub(super) fn from_byte(byte: u8) -> Option<ColumnScales> {
        Self::ALL.get(usize::from(byte)).copied()
    }

    /// The rows of column scales for this number of experts.
    pub fn rows(self, experts: usize) -> usize {
        match self {
            ColumnScales::None => 0,
            ColumnScales::Shared => 1,
            ColumnScales::OfExpert => experts,
        }
    }
}
