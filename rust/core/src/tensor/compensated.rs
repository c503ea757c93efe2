//! Group-wise integers with low-rank compensators.

use rayon::ThreadPool;

use super::values::{fill_floats, look_up_rows};
use super::{
    Array, Compute, Details, Floats, Format, MAGIC_BYTES, Numbers, Section, Tensor, groupwise, no_parameters,
};
use crate::Result;
use crate::formats::compensated::chunk::CHUNK;
use crate::formats::compensated::{FactorRow, Layout, MAGIC, VERSION, View};
use crate::gemm::compensated as gemm;
use crate::gemm::groupwise::MODES;
use crate::gemm::layer::Projection;
use crate::types::{Mode, Shape};

/// The format [`crate::formats::compensated`].
pub(super) struct Compensated;

impl Format for Compensated {
    fn kind(&self) -> &'static str {
        "compensated"
    }

    fn magic(&self) -> [u8; MAGIC_BYTES] {
        MAGIC
    }

    fn version(&self) -> u16 {
        VERSION
    }

    fn bytes(&self, shape: Shape, specification: &Details) -> Result<usize> {
        let base = groupwise::layout(shape, specification)?;
        let (bits, rank) = (
            specification.integer("rank_bits")?,
            specification.integer("total_rank")?,
        );
        Ok(Layout::new(base, bits, rank)?.total_bytes())
    }

    fn open(&self, data: &[u8]) -> Result<Box<dyn Tensor>> {
        Ok(Box::new(View::parse(data)?.layout()))
    }
}

impl Tensor for Layout {
    fn format(&self) -> &'static dyn Format {
        &Compensated
    }

    fn name(&self) -> String {
        format!(
            "groupwise-{}bit+lowrank-{}bit",
            self.base().bits(),
            self.width().bits()
        )
    }

    fn shape(&self) -> Shape {
        self.shape()
    }

    fn bytes(&self) -> usize {
        self.total_bytes()
    }

    fn details(&self) -> Details {
        groupwise::details(&self.base())
            .with("rank_bits", self.width().bits())
            .with("total_rank", self.total_rank())
    }

    fn sections(&self) -> Vec<Section> {
        self.sections().into()
    }

    fn modes(&self) -> &'static [Mode] {
        &MODES
    }

    fn verify(&self, data: &[u8], pool: &ThreadPool) -> Result<()> {
        View::parse(data)?.verify(pool)
    }

    /// Writes the codes of the group-wise part.
    fn decode(&self, data: &[u8], out: &mut [u8], pool: &ThreadPool) -> Result<()> {
        self.base().decode(View::parse(data)?.base().bytes(), out, pool)
    }

    fn dequantize(&self, data: &[u8], out: Floats, pool: &ThreadPool) -> Result<()> {
        let (view, rows) = (View::parse(data)?, self.shape().rows);
        fill_floats(self.shape(), out, pool, |row, values| {
            view.decode_values(row / rows, row % rows, values)
        })
    }

    fn look_up(&self, data: &[u8], rows: &[usize], out: Floats, pool: &ThreadPool) -> Result<()> {
        let (view, count) = (View::parse(data)?, self.shape().rows);
        look_up_rows(self.shape(), rows, out, pool, |row, values| {
            view.decode_values(row / count, row % count, values);
            Ok(())
        })
    }

    fn parameters(&self, data: &[u8], name: &str, pool: &ThreadPool) -> Result<Array> {
        let view = View::parse(data)?;
        match name {
            "ranks" => Ok(ranks(&view)),
            "right" => Ok(factors(&view, self.right().length, View::right)),
            "left" => Ok(factors(&view, self.left().length, View::left)),
            _ => match groupwise::parameters(view.base(), name, pool) {
                Some(found) => Ok(found),
                None => {
                    let known = groupwise::parameter_names(&self.base());
                    no_parameters(self, name, &[known, &["ranks", "right", "left"]].concat())
                }
            },
        }
    }

    fn projection<'a>(&'a self, data: &'a [u8], compute: Compute) -> Result<Box<dyn Projection + 'a>> {
        let weights = gemm::Compensated::new(View::parse(data)?, compute.mode, compute.isa)?;
        Ok(Box::new(weights))
    }
}

/// The rank of each expert's compensator.
fn ranks(view: &View) -> Array {
    let experts = view.layout().shape().experts;
    Array {
        shape: vec![experts],
        values: Numbers::I64((0..experts).map(|expert| view.rank(expert) as i64).collect()),
    }
}

/// The rows of a factor for all experts, T x `length`.
fn factors<'a>(
    view: &View<'a>,
    length: usize,
    row: impl Fn(&View<'a>, usize, usize) -> FactorRow<'a>,
) -> Array {
    let mut values = Vec::new();
    for expert in 0..view.layout().shape().experts {
        for index in 0..view.rank(expert) {
            let row = row(view, expert, index);
            let chunks = (0..length.div_ceil(CHUNK)).map(|chunk| row.chunk(chunk));
            let all = chunks.flat_map(|(scale, codes)| codes.map(|code| scale * code));
            values.extend(all.take(length));
        }
    }
    Array::floats(&[view.layout().total_rank(), length], values)
}
