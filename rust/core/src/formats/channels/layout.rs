//! The header of a tensor and the offsets that follow from it.

use std::cmp::Ordering;

use super::{ALIGNMENT, GROUP, HEADER_BYTES, MAGIC, VERSION, corrupt, invalid};
use crate::formats::header;
use crate::types::Shape;
use crate::{Error, Result, limits};

/// The storage type of values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Width {
    /// A symmetric 4-bit integer.
    Int4,
    /// A symmetric 8-bit integer.
    Int8,
    /// bfloat16.
    Bf16,
}

impl Width {
    /// All widths.
    pub const ALL: [Width; 3] = [Width::Int4, Width::Int8, Width::Bf16];

    /// The bits per value.
    pub fn bits(self) -> usize {
        match self {
            Width::Int4 => 4,
            Width::Int8 => 8,
            Width::Bf16 => 16,
        }
    }

    /// The width with `bits` bits.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if no width has this number of bits.
    pub fn from_bits(bits: u8) -> Result<Width> {
        let found = Width::ALL
            .into_iter()
            .find(|width| width.bits() == usize::from(bits));
        found.map_or_else(|| invalid(format!("values have 4, 8 or 16 bits, not {bits}")), Ok)
    }
}

/// The shape, width and offsets of a tensor, all derived from the header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    experts: usize,
    channels: usize,
    half: usize,
    width: Width,
    record: usize,
    start: usize,
    total: usize,
}

impl Layout {
    /// The layout of a tensor with `channels` channels per expert and halves of `half` columns.
    fn of(experts: usize, channels: usize, half: usize, width: Width) -> Option<Layout> {
        let groups = half.div_ceil(GROUP);
        let values = groups.checked_mul(2 * GROUP / 8 * width.bits())?;
        let scales = if width == Width::Bf16 { 0 } else { 4 * groups };
        let record = values.checked_add(scales)?.checked_next_multiple_of(ALIGNMENT)?;
        let thresholds = experts.checked_mul(4)?.checked_next_multiple_of(ALIGNMENT)?;
        let start = HEADER_BYTES.checked_add(thresholds)?;
        let records = experts.checked_mul(channels)?.checked_mul(record)?;
        let total = start.checked_add(records)?;
        isize::try_from(total).ok()?;
        Some(Layout {
            experts,
            channels,
            half,
            width,
            record,
            start,
            total,
        })
    }

    /// The layout for a writer: each row is a record.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the columns do not form two halves, the tensor is not a stack, or it is too
    /// large.
    pub fn new(shape: Shape, width: Width) -> Result<Layout> {
        let Shape {
            experts,
            rows,
            columns,
            ndim,
        } = shape;
        if ndim != 3 || columns % 2 != 0 {
            return invalid(format!(
                "{shape:?}: expected a stack of records with two halves each"
            ));
        }
        let fits = [
            (experts, limits::MAX_ROWS),
            (rows, limits::MAX_ROWS),
            (columns, limits::MAX_COLUMNS),
        ];
        let fits = fits.iter().all(|&(size, limit)| size as u64 <= limit);
        match Layout::of(experts, rows, columns / 2, width).filter(|_| fits) {
            Some(layout) => Ok(layout),
            None => invalid(format!("{shape:?} is too large")),
        }
    }

    /// Experts, channels, and the columns of both halves.
    pub fn shape(&self) -> Shape {
        Shape {
            experts: self.experts,
            rows: self.channels,
            columns: 2 * self.half,
            ndim: 3,
        }
    }

    /// The storage type of values.
    pub fn width(&self) -> Width {
        self.width
    }

    /// The columns of a half.
    pub fn half(&self) -> usize {
        self.half
    }

    /// The scales of a half.
    pub fn groups(&self) -> usize {
        match self.width {
            Width::Bf16 => 0,
            _ => self.half.div_ceil(GROUP),
        }
    }

    /// The bytes of a record.
    pub fn record_bytes(&self) -> usize {
        self.record
    }

    /// The bytes of a half's values, padding included.
    pub(super) fn half_bytes(&self) -> usize {
        self.half.div_ceil(GROUP) * GROUP / 8 * self.width.bits()
    }

    /// The offset of a record, counted over all experts.
    pub(super) fn record_at(&self, record: usize) -> usize {
        self.start + record * self.record
    }

    /// The size of the tensor in bytes.
    pub fn total_bytes(&self) -> usize {
        self.total
    }

    /// Reads the layout from a tensor's header.
    fn of_header(data: &[u8]) -> Result<Layout> {
        let header: &[u8; HEADER_BYTES] = header::read(data, "channels", MAGIC, VERSION)?;
        if header[11..16].iter().chain(&header[40..]).any(|&b| b != 0) {
            return corrupt("reserved header bytes are not zero");
        }
        let Ok(width) = Width::from_bits(header[10]) else {
            return corrupt(format!("values cannot have {} bits", header[10]));
        };
        let experts = size(header, 16, limits::MAX_ROWS)?;
        let channels = size(header, 24, limits::MAX_ROWS)?;
        let half = size(header, 32, limits::MAX_COLUMNS / 2)?;
        match Layout::of(experts, channels, half, width) {
            Some(layout) => Ok(layout),
            None => corrupt(format!(
                "{experts} x {channels} x {half} is too large for this machine"
            )),
        }
    }

    /// Reads the layout from the bytes before the first record; `head` must hold exactly those.
    ///
    /// # Errors
    /// [`Error::Corruption`] or [`Error::InsufficientData`] if the bytes are not the start of such a tensor.
    pub fn of_head(head: &[u8]) -> Result<Layout> {
        let layout = Layout::of_header(head)?;
        layout.check(head, layout.start)?;
        Ok(layout)
    }

    pub(super) fn read(data: &[u8]) -> Result<Layout> {
        let layout = Layout::of_header(data)?;
        layout.check(data, layout.total)?;
        Ok(layout)
    }

    /// Checks that `data` has `bytes` bytes.
    fn check(&self, data: &[u8], bytes: usize) -> Result<()> {
        match bytes.cmp(&data.len()) {
            Ordering::Equal => Ok(()),
            Ordering::Greater => {
                let message = format!("channels: {} bytes instead of {bytes}", data.len());
                Err(Error::InsufficientData(message))
            }
            Ordering::Less => corrupt(format!("{} bytes contradict the shape", data.len())),
        }
    }

    pub(super) fn write(&self, out: &mut [u8]) {
        out[..8].copy_from_slice(&MAGIC);
        out[8..10].copy_from_slice(&VERSION.to_le_bytes());
        out[10] = self.width.bits() as u8;
        for (field, size) in out[16..40]
            .chunks_exact_mut(8)
            .zip([self.experts, self.channels, self.half])
        {
            field.copy_from_slice(&(size as u64).to_le_bytes());
        }
    }
}

fn size(header: &[u8], at: usize, limit: u64) -> Result<usize> {
    header::dimension(header, at, limit, "channels")
}
