//! Group-wise integers.

use rayon::ThreadPool;
use rayon::prelude::*;

use super::values::{fill_floats, fill_rows, look_up_rows};
use super::{Array, Compute, Details, Floats, Format, MAGIC_BYTES, Section, Tensor, no_parameters};
use crate::Result;
use crate::formats::groupwise::{HEADER_BYTES, Layout, MAGIC, ParameterType, Spec, VERSION, View};
use crate::gemm::groupwise as gemm;
use crate::gemm::layer::Projection;
use crate::types::{Mode, Shape};

/// The format [`crate::formats::groupwise`].
pub(super) struct Groupwise;

impl Format for Groupwise {
    fn kind(&self) -> &'static str {
        "groupwise"
    }

    fn magic(&self) -> [u8; MAGIC_BYTES] {
        MAGIC
    }

    fn version(&self) -> u16 {
        VERSION
    }

    fn bytes(&self, shape: Shape, specification: &Details) -> Result<usize> {
        Ok(layout(shape, specification)?.total_bytes())
    }

    fn open(&self, data: &[u8]) -> Result<Box<dyn Tensor>> {
        Ok(Box::new(View::parse(data)?.layout()))
    }
}

impl Tensor for Layout {
    fn format(&self) -> &'static dyn Format {
        &Groupwise
    }

    fn name(&self) -> String {
        format!("groupwise-{}bit", self.bits())
    }

    fn shape(&self) -> Shape {
        self.shape()
    }

    fn bytes(&self) -> usize {
        self.total_bytes()
    }

    fn details(&self) -> Details {
        details(self)
    }

    fn sections(&self) -> Vec<Section> {
        vec![("blocks", HEADER_BYTES..self.total_bytes())]
    }

    fn modes(&self) -> &'static [Mode] {
        &gemm::MODES
    }

    fn verify(&self, data: &[u8], pool: &ThreadPool) -> Result<()> {
        View::parse(data)?.verify(pool)
    }

    fn decode(&self, data: &[u8], out: &mut [u8], pool: &ThreadPool) -> Result<()> {
        let view = View::parse(data)?;
        fill_rows(self.shape(), out, pool, |row, codes| view.decode_row(row, codes))
    }

    fn dequantize(&self, data: &[u8], out: Floats, pool: &ThreadPool) -> Result<()> {
        let view = View::parse(data)?;
        fill_floats(self.shape(), out, pool, |row, values| {
            view.decode_values(row, values)
        })
    }

    fn look_up(&self, data: &[u8], rows: &[usize], out: Floats, pool: &ThreadPool) -> Result<()> {
        let view = View::parse(data)?;
        look_up_rows(self.shape(), rows, out, pool, |row, values| {
            view.decode_values(row, values);
            Ok(())
        })
    }

    fn parameters(&self, data: &[u8], name: &str, pool: &ThreadPool) -> Result<Array> {
        match parameters(&View::parse(data)?, name, pool) {
            Some(found) => Ok(found),
            None => no_parameters(self, name, parameter_names(self)),
        }
    }

    fn projection<'a>(&'a self, data: &'a [u8], compute: Compute) -> Result<Box<dyn Projection + 'a>> {
        let weights = gemm::Groupwise::new(View::parse(data)?, compute.mode, compute.isa)?;
        Ok(Box::new(weights))
    }
}

/// The layout of a specification.
pub(super) fn layout(shape: Shape, specification: &Details) -> Result<Layout> {
    let spec = Spec {
        bits: specification.integer("bits")?,
        group: specification.integer("group_size")?,
        symmetric: specification.flag("symmetric")?,
        // Both types have 16 bits.
        parameters: ParameterType::F16,
    };
    Layout::new(shape, spec)
}

/// The specification of a layout.
pub(super) fn details(layout: &Layout) -> Details {
    Details::default()
        .with("bits", layout.spec().bits)
        .with("group_size", layout.group_size())
        .with("symmetric", layout.spec().symmetric)
        .with("dtype", layout.spec().parameters.name())
}

/// The names accepted by [`parameters`].
pub(super) fn parameter_names(layout: &Layout) -> &'static [&'static str] {
    match layout.spec().symmetric {
        true => &["scales"],
        false => &["scales", "offsets"],
    }
}

/// Scales or offsets, E x R x G.
pub(super) fn parameters(view: &View, name: &str, pool: &ThreadPool) -> Option<Array> {
    let layout = view.layout();
    let kind = parameter_names(&layout).iter().position(|known| *known == name)?;
    let Shape { experts, rows, .. } = layout.shape();
    let groups = layout.groups();
    let places = (0..experts * rows * groups).into_par_iter();
    let pairs = places.map(|at| view.parameters(at / groups, at % groups));
    let values = pool.install(|| pairs.map(|pair| <[f32; 2]>::from(pair)[kind]).collect());
    Some(Array::floats(&[experts, rows, groups], values))
}
