//! The header of a tensor and the offsets that follow from it.

use std::cmp::Ordering;

use super::{BLOCK_ROWS, HEADER_BYTES, MAGIC, ParameterType, REGISTER_BYTES, VERSION, corrupt, invalid};
use crate::bits::{UNIT, WIDTHS};
use crate::formats::header;
use crate::types::Shape;
use crate::{Error, Result, limits};

/// The group sizes in columns, besides the whole row.
pub const GROUP_SIZES: [usize; 5] = [16, 32, 64, 128, 256];

/// The specification of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Spec {
    /// Bits per code: 2, 3, 4 or 8.
    pub bits: u8,
    /// The columns that share parameters: one of [`GROUP_SIZES`], or 0 for the whole row.
    pub group: usize,
    /// If true, no offsets are stored; weights are `scale * (code - 2^(bits - 1))`.
    pub symmetric: bool,
    /// The type of scales and offsets.
    pub parameters: ParameterType,
}

impl Spec {
    fn exists(&self) -> bool {
        WIDTHS.contains(&self.bits) && (self.group == 0 || GROUP_SIZES.contains(&self.group))
    }
}

/// How a block alternates between parameters and codes, so that a kernel reads one ascending stream.
///
/// A record holds the parameters of one group and then its codes. It holds two groups if the parameters of one do not
/// fill a register or its codes do not fill a unit. The last record of a block may have fewer units.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Record {
    /// The groups of a record: 1 or 2.
    pub groups: usize,
    /// The bytes of a group's parameters.
    pub group_bytes: usize,
    /// The bytes of a record's parameters: whole registers.
    pub parameter_bytes: usize,
    /// The units of a record's codes, at least 1.
    pub units: usize,
    /// The bytes of a whole record.
    pub bytes: usize,
}

impl Record {
    /// The records of a valid specification; a whole row is `units` units.
    fn of(spec: &Spec, units: usize) -> Option<Record> {
        let kinds = 2 - usize::from(spec.symmetric);
        let groups = match spec.group {
            0 => 1,
            group => 1 + usize::from(spec.symmetric || group < UNIT),
        };
        let units = match spec.group {
            0 => units.max(1),
            group => groups * group / UNIT,
        };
        let group_bytes = 2 * BLOCK_ROWS * kinds;
        let parameter_bytes = (groups * group_bytes).next_multiple_of(REGISTER_BYTES);
        let codes = units.checked_mul(REGISTER_BYTES * usize::from(spec.bits))?;
        Some(Record {
            groups,
            group_bytes,
            parameter_bytes,
            units,
            bytes: codes.checked_add(parameter_bytes)?,
        })
    }
}

/// The shape, specification and offsets of a tensor, all derived from the header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    shape: Shape,
    spec: Spec,
    record: Record,
    block_bytes: usize,
    total: usize,
}

impl Layout {
    /// The layout of a shape; `None` if its size overflows. The specification must be valid.
    fn of(shape: Shape, spec: Spec) -> Option<Layout> {
        let units = shape.columns.div_ceil(UNIT);
        let record = Record::of(&spec, units)?;
        let parameter_bytes = units.div_ceil(record.units).checked_mul(record.parameter_bytes)?;
        let block_bytes = units
            .checked_mul(REGISTER_BYTES * usize::from(spec.bits))?
            .checked_add(parameter_bytes)?;
        let blocks = shape.experts.checked_mul(shape.rows.div_ceil(BLOCK_ROWS))?;
        let total = blocks.checked_mul(block_bytes)?.checked_add(HEADER_BYTES)?;
        isize::try_from(total).ok()?;
        Some(Layout {
            shape,
            spec,
            record,
            block_bytes,
            total,
        })
    }

    /// The layout for a writer. A group size that is not smaller than the row means the whole row.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the specification is not supported or the shape is too large.
    pub fn new(shape: Shape, mut spec: Spec) -> Result<Layout> {
        if !GROUP_SIZES.contains(&spec.group) && spec.group >= shape.columns {
            spec.group = 0;
        }
        if !spec.exists() {
            return invalid(format!(
                "{} bits in groups of {} columns: bits must be 2, 3, 4 or 8, and groups {GROUP_SIZES:?} or the whole row",
                spec.bits, spec.group
            ));
        }
        if !shape.has_valid_ndim() {
            return invalid(format!(
                "ndim {} does not fit {} experts",
                shape.ndim, shape.experts
            ));
        }
        let sizes = [shape.experts, shape.rows, shape.columns];
        let limits = [limits::MAX_ROWS, limits::MAX_ROWS, limits::MAX_COLUMNS];
        let fits = sizes
            .iter()
            .zip(limits)
            .all(|(&size, limit)| size as u64 <= limit);
        match Layout::of(shape, spec).filter(|_| fits) {
            Some(layout) => Ok(layout),
            None => invalid(format!("{shape:?} is too large")),
        }
    }

    /// Experts, rows, columns and ndim.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Bits, group size (0: the whole row), symmetry and parameter type.
    pub fn spec(&self) -> Spec {
        self.spec
    }

    /// The bits per code.
    pub fn bits(&self) -> usize {
        usize::from(self.spec.bits)
    }

    /// The number of columns that share a scale; if groups are whole rows, the columns, but at least 1.
    pub fn group_size(&self) -> usize {
        match self.spec.group {
            0 => self.shape.columns.max(1),
            group => group,
        }
    }

    /// The groups of a row; zero if there are no columns.
    pub fn groups(&self) -> usize {
        groups(self.shape.columns, self.spec.group)
    }

    /// The 16-row blocks of an expert.
    pub fn blocks(&self) -> usize {
        self.shape.rows.div_ceil(BLOCK_ROWS)
    }

    /// The 32-column units of a row.
    pub fn units(&self) -> usize {
        self.shape.columns.div_ceil(UNIT)
    }

    /// The bytes of a block.
    pub fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    /// The size of the tensor in bytes.
    pub fn total_bytes(&self) -> usize {
        self.total
    }

    /// How blocks alternate between parameters and codes.
    #[inline]
    pub(crate) fn record(&self) -> Record {
        self.record
    }

    /// The offset in a block of a group's parameters: 16 scales, then, unless the tensor is symmetric, 16 offsets.
    pub(crate) fn parameters_at(&self, group: usize) -> usize {
        let Record {
            groups,
            group_bytes,
            bytes,
            ..
        } = self.record;
        group / groups * bytes + group % groups * group_bytes
    }

    /// The offset in a block of a unit's registers.
    pub(crate) fn unit_at(&self, unit: usize) -> usize {
        let Record {
            parameter_bytes,
            units,
            bytes,
            ..
        } = self.record;
        unit / units * bytes + parameter_bytes + unit % units * self.bits() * REGISTER_BYTES
    }

    /// The records of a block, in order: parameters and codes.
    pub(crate) fn records<'a>(&self, block: &'a [u8]) -> impl Iterator<Item = (&'a [u8], &'a [u8])> {
        let Record {
            parameter_bytes,
            bytes,
            ..
        } = self.record;
        block
            .chunks(bytes)
            .map(move |record| record.split_at(parameter_bytes))
    }

    pub(super) fn read(data: &[u8]) -> Result<Layout> {
        let layout = Layout::read_header(data)?;
        match layout.total.cmp(&data.len()) {
            Ordering::Equal => Ok(layout),
            Ordering::Greater => {
                let (found, total) = (data.len(), layout.total);
                let message = format!("group-wise tensor: {found} bytes instead of {total}");
                Err(Error::InsufficientData(message))
            }
            Ordering::Less => corrupt(format!("{} bytes contradict the shape", data.len())),
        }
    }

    /// Reads the layout from a header; any number of bytes may follow it.
    fn read_header(data: &[u8]) -> Result<Layout> {
        let header: &[u8; HEADER_BYTES] = header::read(data, "group-wise tensor", MAGIC, VERSION)?;
        if header[14..16].iter().chain(&header[48..]).any(|&b| b != 0) {
            return corrupt("reserved header bytes are not zero");
        }
        let (shape, spec) = (read_shape(header)?, read_spec(header)?);
        match Layout::of(shape, spec) {
            Some(layout) => Ok(layout),
            None => corrupt(format!("{shape:?} is too large for this machine")),
        }
    }

    pub(super) fn write(&self, out: &mut [u8]) {
        let Spec {
            bits,
            symmetric,
            parameters,
            ..
        } = self.spec;
        out[..8].copy_from_slice(&MAGIC);
        out[8..10].copy_from_slice(&VERSION.to_le_bytes());
        out[10..14].copy_from_slice(&[bits, parameters as u8, self.shape.ndim, symmetric.into()]);
        let Shape {
            experts,
            rows,
            columns,
            ..
        } = self.shape;
        let sizes = [experts, rows, columns, self.spec.group];
        for (field, size) in out[16..48].chunks_exact_mut(8).zip(sizes) {
            field.copy_from_slice(&(size as u64).to_le_bytes());
        }
    }
}

fn groups(columns: usize, group: usize) -> usize {
    match group {
        0 => columns.min(1),
        group => columns.div_ceil(group),
    }
}

fn read_shape(header: &[u8]) -> Result<Shape> {
    let shape = Shape {
        experts: size(header, 16, limits::MAX_ROWS)?,
        rows: size(header, 24, limits::MAX_ROWS)?,
        columns: size(header, 32, limits::MAX_COLUMNS)?,
        ndim: header[12],
    };
    match shape.has_valid_ndim() {
        true => Ok(shape),
        false => corrupt(format!(
            "ndim {} does not fit {} experts",
            shape.ndim, shape.experts
        )),
    }
}

fn read_spec(header: &[u8]) -> Result<Spec> {
    let Some(&parameters) = ParameterType::ALL.get(usize::from(header[11])) else {
        return corrupt(format!("unknown parameter type {}", header[11]));
    };
    let spec = Spec {
        bits: header[10],
        group: size(header, 40, limits::MAX_COLUMNS)?,
        symmetric: header[13] == 1,
        parameters,
    };
    match spec.exists() && header[13] <= 1 {
        true => Ok(spec),
        false => corrupt(format!(
            "{} bits, groups of {}, symmetry {}",
            spec.bits, spec.group, header[13]
        )),
    }
}

fn size(header: &[u8], at: usize, limit: u64) -> Result<usize> {
    header::dimension(header, at, limit, "group-wise tensor")
}
