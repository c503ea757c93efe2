//! Memory that holds one thing at a time, such as a record of a tensor.

/// Aligned memory.
#[derive(Debug)]
pub struct Slot {
    memory: Box<[u8]>,
    start: usize,
    length: usize,
}

impl Slot {
    /// Zeros, aligned to `alignment` bytes.
    pub(crate) fn new(length: usize, alignment: usize) -> Slot {
        let memory = vec![0; length + alignment - 1].into_boxed_slice();
        let start = memory.as_ptr().align_offset(alignment).min(alignment - 1);
        Slot {
            memory,
            start,
            length,
        }
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.memory[self.start..][..self.length]
    }

    /// The bytes, for writing.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..][..self.length]
    }
}
