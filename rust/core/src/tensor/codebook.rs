//! Codebook tensors.

use rayon::ThreadPool;

use super::values::{fill_floats, fill_rows, look_up_rows};
use super::{Array, Compute, Details, Floats, Format, MAGIC_BYTES, Section, Tensor, no_parameters};
use crate::Result;
use crate::formats::codebook::{HEADER_BYTES, Layout, MAGIC, PANEL, VERSION, View};
use crate::gemm::codebook as gemm;
use crate::gemm::layer::Projection;
use crate::types::{Mode, Shape};

/// The format [`crate::formats::codebook`].
pub(super) struct Codebook;

impl Format for Codebook {
    fn kind(&self) -> &'static str {
        "codebook"
    }

    fn magic(&self) -> [u8; MAGIC_BYTES] {
        MAGIC
    }

    fn version(&self) -> u16 {
        VERSION
    }

    fn bytes(&self, shape: Shape, specification: &Details) -> Result<usize> {
        let (bits, block) = (
            specification.integer("bits")?,
            specification.integer("block_size")?,
        );
        let activation_bits = specification.integer("activation_bits")?;
        // The rotation of columns does not affect the size.
        Ok(Layout::new(shape, bits, activation_bits, block, 1)?.total_bytes())
    }

    fn open(&self, data: &[u8]) -> Result<Box<dyn Tensor>> {
        Ok(Box::new(View::parse(data)?.layout()))
    }
}

impl Tensor for Layout {
    fn format(&self) -> &'static dyn Format {
        &Codebook
    }

    fn name(&self) -> String {
        match self.activation_bits() {
            0 => format!("codebook-{}bit", self.bits()),
            activations => format!("codebook-{}bit-a{activations}", self.bits()),
        }
    }

    fn shape(&self) -> Shape {
        self.shape()
    }

    fn bytes(&self) -> usize {
        self.total_bytes()
    }

    fn details(&self) -> Details {
        Details::default()
            .with("bits", self.bits())
            .with("block_size", self.block_size())
            .with("activation_bits", self.activation_bits())
            .with("hadamard", self.hadamard())
    }

    fn sections(&self) -> Vec<Section> {
        vec![("panels", HEADER_BYTES..self.total_bytes())]
    }

    fn modes(&self) -> &'static [Mode] {
        &gemm::MODES
    }

    fn verify(&self, data: &[u8], _: &ThreadPool) -> Result<()> {
        View::parse(data)?.verify()
    }

    fn decode(&self, data: &[u8], out: &mut [u8], pool: &ThreadPool) -> Result<()> {
        let (view, rows) = (View::parse(data)?, self.shape().rows);
        fill_rows(self.shape(), out, pool, |row, codes| {
            view.decode_row(row / rows, row % rows, codes)
        })
    }

    /// Writes the values, rotated back if products rotate activations.
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

    fn parameters(&self, data: &[u8], name: &str, _: &ThreadPool) -> Result<Array> {
        let view = View::parse(data)?;
        let Shape { experts, rows, .. } = self.shape();
        let (blocks, clusters) = (self.blocks(), self.clusters());
        let places = (0..experts * rows * blocks).map(|at| (at / blocks, at % blocks));
        let places = places.map(|(row, block)| {
            let (expert, row) = (row / rows, row % rows);
            (view.block(expert, row / PANEL, block), row % PANEL)
        });
        match name {
            "scales" => {
                let scales = places.map(|(block, row)| block.scales()[row]);
                Ok(Array::floats(&[experts, rows, blocks], scales.collect()))
            }
            "centroids" => {
                let books = places
                    .flat_map(|(block, row)| (0..clusters).map(move |code| block.centroid(row, code) as f32));
                Ok(Array::floats(&[experts, rows, blocks, clusters], books.collect()))
            }
            _ => no_parameters(self, name, &["scales", "centroids"]),
        }
    }

    fn projection<'a>(&'a self, data: &'a [u8], compute: Compute) -> Result<Box<dyn Projection + 'a>> {
        let Compute {
            mode,
            activation_bits,
            isa,
        } = compute;
        let view = View::parse(data)?;
        let weights = gemm::Codebook::with_activation_bits(view, mode, activation_bits, isa)?;
        Ok(Box::new(weights))
    }
}
